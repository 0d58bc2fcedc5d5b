"""Routes about one replica through a router: the events, the pages, the operator's routes, `slotwise top`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import JSON, Server, eventually
from support.scale_door import Behind, behind, door_of

from slotwise.api.app import ROUTES
from slotwise.cli import main
from slotwise.fleet.replicas import named
from slotwise.observe.lines import JSON as JSON_LINES
from slotwise.observe.lines import TEXT

IN_PATH = {"{response_id:path}": "x", "{model:path}": "toy", "{request_id:path}": "x"}


def names(two: Behind) -> list[str]:
    return [one["name"] for one in two.states()]


def replica(two: Behind, name: str) -> Server:
    return next(one for one in two.replicas if one.url.endswith(name))


def message(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def complete(two: Behind, name: str, request_id: str) -> httpx.Response:
    body = {"prompt": [40, 41], "max_tokens": 3, "ignore_eos": True}
    answer = two.door.post(f"/v1/completions?replica={name}", body, **{"X-Request-Id": request_id})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _ in ROUTES])
def test_every_route_of_a_replica_is_one_of_the_router(two: Behind, method: str, path: str) -> None:
    for pattern, value in IN_PATH.items():
        path = path.replace(pattern, value)
    if path == "/events":
        path += f"?follow=0&replica={names(two)[0]}"
    content = b"" if method == "GET" else b"{}"
    answer = two.door.client.request(method, two.door.url + path, headers=JSON, content=content)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 404:
        assert answer.json()["error"]["param"] in ("response_id", "request_id"), "there is the route"
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def test_a_request_and_its_events_are_of_the_replica_that_is_named(two: Behind) -> None:
    for number, name in enumerate(names(two)):
        assert complete(two, name, f"pinned-{number}").headers["x-slotwise-replica"] == name
    for number, name in enumerate(names(two)):
        told = two.door.get(f"/events?follow=0&replica={name}")
        assert told.status_code == 200 and told.headers["content-type"] == "application/x-ndjson"
        entries = map(json.loads, told.content.splitlines())
        ids = [entry["add"]["name"] for entry in entries if entry["kind"] == "request"]
        assert f"cmpl-pinned-{number}-" in " ".join(ids) and f"cmpl-pinned-{1 - number}-" not in " ".join(ids)
        assert told.content == replica(two, name).get("/events?follow=0").content
        assert two.door.get(f"/explain/cmpl-pinned-{number}").json()["requests"]


def test_a_replica_must_be_named_where_there_are_several(two: Behind) -> None:
    for path in ("/events", "/replica", "/experts"):
        said = message(two.door.get(path))
        assert f"{path}?replica=NAME" in said and all(name in said for name in names(two))
    assert "no replica 'x' answers" in message(two.door.get("/events?replica=x"))
    assert "no replica 'x' answers" in message(two.door.post("/v1/completions?replica=x", {"prompt": [1]}))
    assert "name one replica" in message(two.door.get("/events?replica="))
    assert "/v1/load_model is of one replica" in message(two.door.post("/v1/load_model", {"model": "/x"}))


def test_the_only_replica_needs_no_name(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, number=1) as one:
        assert one.door.get("/events?follow=0").content == one.replicas[0].get("/events?follow=0").content
        assert one.door.get("/replica").json().keys() == one.replicas[0].get("/replica").json().keys()


def put(two: Behind, query: str, body: dict[str, Any]) -> httpx.Response:
    return two.door.client.put(f"{two.door.url}/admin/scheduling{query}", content=json.dumps(body), headers=JSON)


def slots(two: Behind) -> list[int]:
    return [replica(two, name).get("/admin/scheduling").json()["max_num_seqs"] for name in names(two)]


def test_settings_are_changed_on_every_replica_or_on_one(two: Behind) -> None:
    before = slots(two)
    answer = put(two, "", {"max_num_seqs": 3})
    assert answer.status_code == 200 and list(answer.json()["replicas"]) == names(two) and slots(two) == [3, 3]
    assert put(two, f"?replica={names(two)[1]}", {"max_num_seqs": 5}).json()["max_num_seqs"] == 5
    assert slots(two) == [3, 5]
    told = two.door.get("/admin/scheduling").json()["replicas"]
    assert [told[name]["max_num_seqs"] for name in names(two)] == [3, 5]
    assert f"replica {names(two)[0]}: max_num_seqs" in message(put(two, "", {"max_num_seqs": 0}))
    assert put(two, "", {"max_num_seqs": before[0]}).status_code == 200
    assert two.door.get("/is_sleeping").json()["replicas"][names(two)[0]] == {"is_sleeping": False, "level": 0}


def test_a_subscriber_that_leaves_leaves_the_replica(two: Behind) -> None:
    """A client has four of them: a fifth is refused while the first four are held."""
    url = f"{two.door.url}/events?replica={names(two)[0]}"
    for _ in range(6):
        def is_let_in() -> bool:
            with httpx.stream("GET", url, timeout=60) as stream:
                return stream.status_code == 200 and b'"run"' in next(stream.iter_raw())
        eventually(is_let_in)


def test_a_router_that_ends_ends_the_streams_of_events(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, number=1) as one, httpx.stream("GET", f"{one.door.url}/events", timeout=60) as stream:
        lines = stream.iter_lines()
        assert '"run"' in next(lines)
        one.door.process.terminate()
        list(lines)  # to its end: a connection that is cut raises


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_disconnected(folder: Path, tmp_path: Path) -> None:
    """The backlog is larger than what sockets and buffers of such a connection hold."""
    with behind(folder, tmp_path, "seconds_per_step=0", number=1) as one, socket.socket() as silent:
        for _ in range(9):
            assert one.door.post("/v1/completions", {"prompt": [40], "n": 64, "max_tokens": 300}).status_code == 200
        host, port = one.door.url.removeprefix("http://").split(":")
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((host, int(port)))
        silent.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent.recv(1)
        assert one.door.get("/load").json()["server_load"] == 1
        eventually(lambda: one.door.get("/load").json()["server_load"] == 0)
        eventually(lambda: one.replicas[0].get("/load").json()["server_load"] == 0)


def test_pages_lead_to_the_replicas(two: Behind, tmp_path: Path) -> None:
    urls = [one for replica in two.replicas for one in ("--replica-url", replica.url)]
    with door_of(*urls, "--no-ui", log=tmp_path / "door") as door:
        eventually(lambda: all(one["is_up"] for one in door.get("/replicas").json()["replicas"]))
        page = door.get("/")
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in page.headers[
        "content-security-policy"]
    assert all(f'href="/timeline?replica={name.replace(":", "%3A")}"' in page.text for name in names(two))
    assert 'data-router="router"' in two.door.get("/").text
    described = two.door.get("/openapi.json").json()["paths"]
    assert {"/replicas", "/admin/replicas", "/what_if", "/v1/chat/completions"} <= described.keys()
    assert "replica" in [one["name"] for one in described["/what_if"]["post"]["parameters"]]
    docs = two.door.get("/docs").text
    assert "PUT /admin/replicas" in docs and "POST /v1/completions" in docs


def test_a_router_with_a_key_names_no_replica_to_strangers(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, number=1, key="secret") as one:
        (name,) = [state["name"] for state in one.states()]
        for path in ("/", "/docs", "/timeline"):
            page = one.door.get(path)
            assert page.status_code == 200 and name not in page.text
        assert one.door.get("/events").status_code == one.door.get("/openapi.json").status_code == 401
        opened = one.door.get("/events?follow=0", Authorization="Bearer secret")
        assert opened.status_code == 200 and b'"run"' in opened.content


def test_top_shows_every_replica_or_the_batch_of_one(two: Behind, capsys: pytest.CaptureFixture[str]) -> None:
    complete(two, names(two)[0], "in-top")
    assert main(["top", two.door.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 replicas up" in shown and all(name in shown for name in names(two)) and "all" in shown
    assert main(["top", two.door.url, "--replica", names(two)[0], "--once"]) == 0
    assert "continuous batching" in capsys.readouterr().out
    assert main(["top", two.door.url, "--replica", "x", "--once"]) == 1
    assert "no replica 'x' answers" in capsys.readouterr().err


def test_a_what_if_is_asked_of_one_replica(two: Behind, capsys: pytest.CaptureFixture[str]) -> None:
    complete(two, names(two)[0], "what")
    asked = ["what-if", "--url", two.door.url, "--set", "max_num_seqs=1"]
    assert main(asked) == 1 and "is of one replica" in capsys.readouterr().err
    assert main([*asked, "--replica", names(two)[0]]) == 0
    assert "what if" in capsys.readouterr().out


def test_lines_of_a_replica_have_its_name() -> None:
    assert named("a line", "1", TEXT) == "[replica 1] a line"
    assert json.loads(named('{"level": "info", "message": "ready"}', "1", JSON_LINES)) == {
        "replica": "1", "level": "info", "message": "ready"}
    assert json.loads(named("Aborted", "1", JSON_LINES))["message"] == "Aborted"
    assert named("a line", "", TEXT) == "a line"

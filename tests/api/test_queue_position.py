"""Where am I: places in the queue by the policy in force, told by a route, by headers and by refusals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import ENDLESS, ENDLESS_CONTEXT, Server, eventually, running, unanswered

COMPLETIONS, SCHEDULING = "/v1/completions", "/admin/scheduling"
ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
ROOT = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("log")
    with running(folder, path / "engine", "seconds_per_step=0.02", "max_num_seqs=1", "max_num_queued_reqs=7",
                 ENDLESS_CONTEXT, "api_keys=one,two", "admin_api_key=root") as started:
        yield started


def where(server: Server, name: str, **headers: str) -> list[dict[str, Any]]:
    answer = server.get(f"/requests/{name}", **(headers or ONE))
    assert answer.status_code in (200, 404), answer.text
    return answer.json()["requests"] if answer.status_code == 200 else []


@contextmanager
def line(server: Server, **priorities: int) -> Iterator[dict[str, httpx.Response]]:
    """Requests of these names and priorities, one after the other; what they were answered, once they are aborted."""
    answers: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        body = ENDLESS | {"request_id": name, "priority": priorities[name]}
        answers[name] = httpx.post(server.url + COMPLETIONS, json=body, headers=ONE, timeout=120)

    threads = []
    for name in priorities:
        threads.append(threading.Thread(target=ask, args=(name,)))
        threads[-1].start()
        eventually(lambda name=name: where(server, name))
    try:
        yield answers
    finally:
        server.post("/abort_requests", {"request_ids": list(priorities)}, **ONE)
        for thread in threads:
            thread.join()
        eventually(lambda: is_quiet(server))


def is_quiet(server: Server) -> bool:
    text = server.get("/metrics", **ONE).text
    return all(f'slotwise:num_requests_{state}{{model_name="toy"}} 0.0' in text for state in ("running", "waiting"))


def schedule(server: Server, **changes: Any) -> None:
    assert server.client.put(server.url + SCHEDULING, json=changes, headers=ROOT).status_code == 200


def test_places_are_those_of_the_policy_in_force(server: Server) -> None:
    with line(server, a=0, b=0, c=3, d=-2) as answers:
        eventually(lambda: where(server, "a")[0]["completion_tokens"] > 3)
        (running_one,) = where(server, "a")
        assert running_one["state"] == "running" and running_one["queue_position"] is None
        assert running_one["estimated_start_s"] is None and running_one["id"].startswith("cmpl-a-")
        assert [where(server, name)[0]["queue_position"] for name in "bcd"] == [0, 1, 2]
        assert where(server, "cmpl-d")[0]["queue_position"] == 2  # by the name of its response, too
        schedule(server, scheduling_policy="priority", preemption_gap=100)
        assert [where(server, name)[0]["queue_position"] for name in "bcd"] == [1, 2, 0]
        (waiting,) = where(server, "c")
        assert waiting["state"] == "waiting" and waiting["completion_tokens"] == 0
        assert 0 <= time.time() - waiting["since"] < 60 and waiting["service_tier"] is None
        schedule(server, preemption_gap=1)
        eventually(lambda: where(server, "d")[0]["state"] == "running")
        assert where(server, "a")[0]["state"] == "preempted" and where(server, "a")[0]["queue_position"] == 0
        assert where(server, "d")[0]["since"] >= waiting["since"]
    schedule(server, scheduling_policy="fcfs")
    assert [answers[name].headers["x-queue-position"] for name in "abcd"] == ["0", "0", "1", "2"]


def test_the_start_is_estimated_once_a_pace_is_known(server: Server) -> None:
    estimates: list[float] = []

    def keep_asking(number: int) -> None:
        body = {"prompt": [40], "max_tokens": 4, "request_id": f"n{number}"}
        with httpx.Client(timeout=120, headers=ONE) as client:
            while not estimates:
                assert client.post(server.url + COMPLETIONS, json=body).status_code == 200

    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    while not estimates:
        for number in range(6):
            estimates += [one["estimated_start_s"] / (one["queue_position"] + 1) for one in where(server, f"n{number}")
                          if one["estimated_start_s"] is not None]
    for thread in threads:
        thread.join()
    assert all(0.02 < seconds < 120 for seconds in estimates)  # of four steps of 0.02 s each
    eventually(lambda: is_quiet(server))
    with line(server, x=0, y=0) as answers:
        assert where(server, "y")[0]["estimated_start_s"] > 0
    assert answers["x"].headers["x-estimated-start-ms"] == "0" < answers["y"].headers["x-estimated-start-ms"]


def test_nobody_sees_where_others_are(server: Server) -> None:
    with line(server, mine=0):
        assert where(server, "mine") and not where(server, "mine", **TWO)
        assert server.get("/requests/mine").status_code == 401
    gone = server.get("/requests/mine", **ONE)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "request_not_found"


def test_a_stream_and_a_refusal_say_how_many_wait(server: Server) -> None:
    with line(server, p=0, q=0, r=0, s=0, t=0, u=0, v=0):
        full = server.post(COMPLETIONS, ENDLESS, **ONE)
        assert full.status_code == 503 and full.headers["x-queue-position"] == "6" and full.headers["retry-after"]
        assert "6 requests wait, 6 of them this client's" in full.json()["error"]["message"]
    with server.client.stream(
            "POST", server.url + COMPLETIONS, json={"prompt": [40], "max_tokens": 3, "stream": True},
            headers=ONE) as answer:
        assert answer.headers["x-queue-position"] == "0" and answer.headers["x-estimated-start-ms"] == "0"
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_the_questions_of_one_client_keep_no_other_out(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    question = f"GET /requests/mine HTTP/1.1\r\nHost: localhost\r\nAuthorization: {ONE['Authorization']}\r\n\r\n"
    with ExitStack() as stack:
        stack.enter_context(unanswered(server, COMPLETIONS, ENDLESS | {"request_id": "other"}, **TWO))
        eventually(lambda: where(server, "other", **TWO))
        stack.enter_context(line(server, mine=0))
        crowd = [stack.enter_context(socket.create_connection((host, int(port)), timeout=120)) for _ in range(100)]
        for _ in range(3):
            for connection in crowd:
                connection.sendall(question.encode())
            assert server.get("/requests/other", **TWO).status_code == 200
            told = [connection.recv(1 << 16) for connection in crowd]
            assert {one[9:12] for one in told} <= {b"200", b"429"} and any(b'"queries_full"' in one for one in told)
        server.post("/abort_requests", {"request_id": "other"}, **TWO)


def test_each_choice_stands_for_itself(server: Server) -> None:
    thread = threading.Thread(target=server.post, args=(COMPLETIONS, ENDLESS | {"n": 3, "request_id": "several"}),
                              kwargs=ONE)
    thread.start()
    eventually(lambda: [one["queue_position"] for one in where(server, "several")] == [None, 0, 1])
    assert [one["index"] for one in where(server, "several")] == [0, 1, 2]
    server.post("/abort_requests", {"request_id": "several"}, **ONE)
    thread.join()

"""Where a request's time went, asked of a live server: afterwards, meanwhile, and in the response itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.canary import singing
from support.live_server import Server, children, counted, running

from slotwise.observe.event_log import Sent, decode
from slotwise.observe.explain import PARTS, explain
from slotwise.observe.fold import gather
from slotwise.observe.step_time_store import ObservedStepTimes
from slotwise.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def check(explanation: dict[str, Any]) -> dict[str, float]:
    """Its parts, in milliseconds."""
    assert all(part["part"] in PARTS and part["ms"] > 0 for part in explanation["parts"])
    assert sum(part["ms"] for part in explanation["parts"]) == pytest.approx(explanation["total_ms"], abs=0.001)
    parts: dict[str, float] = {}
    for part in explanation["parts"]:
        parts[part["part"]] = parts.get(part["part"], 0) + part["ms"]
    return parts


def explained(server: Server, name: str, **headers: str) -> list[dict[str, Any]]:
    answer = server.get(f"/explain/{name}", **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_by_the_names_its_client_knows(server: Server, path: str) -> None:
    name = f"mine/{path[4:8]}?"
    body = {"prompt": [40, 41]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    began = time.monotonic()
    answer = server.post(path, body | {"max_tokens": 30}, **{"X-Request-Id": name}).json()
    (explanation,) = explained(server, answer["id"].replace("?", "%3F"))
    waited_ms = (time.monotonic() - began) * 1e3  # a client may have its answer before the server knows that it is sent
    assert explained(server, name.replace("?", "%3F")) == [explanation] == explained(server,
                                                                                     explanation["id"].replace("?",
                                                                                                               "%3F"))
    parts = check(explanation)
    assert {"tokenizing", "prefill", "decode", "sending"} <= parts.keys() and "neighbors" not in parts
    assert explanation["completion_tokens"] == 30 and explanation["finish_reason"] == "length"
    assert parts["decode"] > 29, "29 tokens at a millisecond each"
    assert explanation["total_ms"] <= waited_ms


def test_a_client_that_reads_its_stream_finds_the_same_as_the_log(server: Server) -> None:
    events = server.events(COMPLETIONS, {"prompt": [7], "max_tokens": 20})
    (explanation,) = explained(server, events[0]["id"])
    entries = [decode(line) for line in server.get("/events?follow=0").text.splitlines()]
    (timeline,) = [timeline for timeline in gather(entries).values() if timeline.is_named(events[0]["id"])]
    (sent,) = [entry for entry in entries if isinstance(entry, Sent) and entry.number == timeline.request.number]
    told = explain(timeline, entries, ObservedStepTimes())
    assert told.total_ns == sent.last_ns - timeline.request.timing.received_ns
    assert explanation["total_ms"] == pytest.approx(told.total_ns / 1e6, abs=1e-5)


def test_in_the_response(server: Server) -> None:
    body = {"prompt": [40], "max_tokens": 12, "explain": True}
    answer = server.post(COMPLETIONS, body).json()
    (explanation,) = answer["slotwise"]["explain"]["requests"]
    assert {"prefill", "decode"} <= check(explanation).keys() and explanation["id"].startswith(answer["id"])
    assert answer["slotwise"]["explain"]["step_time_model"]["steps"] > 0
    assert "slotwise" not in server.post(COMPLETIONS, body | {"explain": False}).json()


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_at_the_end_of_a_stream(server: Server, options: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "n": 2, "explain": True}
    *events, last = server.events(CHAT, body | {"stream_options": options})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    assert all("slotwise" not in event for event in events)
    explanations = last["slotwise"]["explain"]["requests"]
    assert [explanation["finish_reason"] for explanation in explanations] == ["length", "length"]
    for explanation in explanations:
        check(explanation)


def test_a_stop_string_ends_the_engines_part(server: Server) -> None:
    text = server.post(COMPLETIONS, {"prompt": [50], "max_tokens": 20}).json()["choices"][0]["text"]
    body = {"prompt": [50], "max_tokens": 200, "stop": text[8:12], "explain": True}
    (explanation,) = server.post(COMPLETIONS, body).json()["slotwise"]["explain"]["requests"]
    assert explanation["finish_reason"] == "stop" and check(explanation)["sending"] > 0


def test_one_that_still_runs(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "seconds_per_step=0.05") as server, server.client.stream(
            "POST", server.url + COMPLETIONS, json={"prompt": [40], "max_tokens": 400, "stream": True},
            headers={"X-Request-Id": "running"}) as response:
        lines = response.iter_lines()
        next(lines)
        (explanation,) = explained(server, "running")
        assert explanation["finish_reason"] is None
        assert "prefill" in check(explanation) and "sending" not in check(explanation)


def test_names_may_repeat(server: Server) -> None:
    for _ in range(18):
        server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 1, "request_id": "again"})
    explanations = explained(server, "again")
    assert len(explanations) == 16, "the latest"
    assert [explanation["number"] for explanation in explanations] == sorted(explanation["number"]
                                                                             for explanation in explanations)


def test_nobody_sees_anothers(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "engine", "api_keys=one,two") as server:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        for salt in ({}, {"cache_salt": "x"}):
            server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 2, "request_id": "secret"} | salt, **one)
        assert len(explained(server, "secret", **one)) == 2
        refused = server.get("/explain/secret", **two)
        unknown = server.get("/explain/nobody", **two)
        assert refused.status_code == 404 == unknown.status_code
        assert refused.json() == unknown.json() and refused.json()["error"]["code"] == "request_not_found"


def test_one_client_asks_for_many_and_a_stream_goes_on(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The stream's gap is in computing time of the API process: what the questions cost it."""
    settings = ("api_keys=one,two,admin", "admin_api_key=admin", "seconds_per_step=0.001")
    with running(folder, tmp_path / "engine", *settings) as server:
        server.client.headers["Authorization"] = "Bearer two"
        for _ in range(3):  # a ring full of steps
            server.post(COMPLETIONS, {"prompt": [40], "n": 64, "max_tokens": 300}, **{"X-Request-Id": "long"})
        statuses: list[int] = []

        def ask(key: str) -> None:
            with httpx.Client(timeout=120, headers={"Authorization": f"Bearer {key}"}) as client:
                for _ in range(3):
                    answer = client.get(server.url + "/explain/long")
                    if answer.status_code == 404:  # on a busy machine the stream pushes it out of the ring
                        return
                    assert answer.status_code == 200 or int(answer.headers.get("retry-after", 0)) > 0, answer.text
                    statuses.append(answer.status_code)

        with singing(server, tokenizer.decode(counted(40, 200)), "one") as canary, ThreadPoolExecutor(16) as clients:
            list(clients.map(ask, ["two"] * 13 + ["admin"] * 3))
        assert set(statuses) == {200, 429}, "each client may have a few that wait"
        assert canary.gap < 0.2
        server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 4}, **{"X-Request-Id": "after"})
        assert explained(server, "after")


def test_what_is_asked_counts_as_a_request(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiers").write_text('[[tier]]\nname = "a"\nrequests_per_minute = 3\napi_keys = ["one"]\n')
    with running(folder, tmp_path / "engine", f"tiers={tmp_path / 'tiers'}") as server:
        key = {"Authorization": "Bearer one"}
        answers = [server.get("/explain/nobody", **key) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [404, 404, 404, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"


def test_a_worker_that_was_killed_is_replaced_before_the_explanation(server: Server) -> None:
    (worker,) = _asked(server)
    os.kill(worker, signal.SIGKILL)
    answer = server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 3, "explain": True}).json()
    told = answer["slotwise"]["explain"]
    assert len(told["requests"]) == 1 and "error" not in told
    (again,) = _asked(server)
    assert again != worker


def test_a_response_is_complete_without_its_explanation(server: Server) -> None:
    """Where its workers end again and again; on a busy machine one may answer before it is killed."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            asked = pool.submit(
                lambda: server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 3, "explain": True}).json())
            while not asked.done():
                for worker in children(server.process.pid, b"slotwise.observe.explain"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
            answer, told = asked.result(), asked.result()["slotwise"]["explain"]
            assert answer["usage"]["completion_tokens"] == 3
            if not told["requests"]:
                break
        assert told["requests"] == [] and told["error"]["code"] == "not_explained"
        assert _asked(server)


def _asked(server: Server) -> list[int]:
    """The workers that explain, after a request that asked for it."""
    answer = server.post(COMPLETIONS, {"prompt": [40], "max_tokens": 3, "explain": True}).json()
    assert answer["slotwise"]["explain"]["requests"]
    return children(server.process.pid, b"slotwise.observe.explain")

"""`POST /what_if`: a server's own last minutes under other settings, answered by a process beside it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.live_server import JSON, Server, running

from slotwise import builtin
from slotwise.api.generate import what_if_replay
from slotwise.api.generate.what_if_replay import WhatIf
from slotwise.api.http.api_errors import ApiError
from slotwise.api.protocol.admin_protocol import WhatIfRequest
from slotwise.cli import main
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.event_log import line_of
from slotwise.observe.log_file import read_file
from slotwise.observe.ring import Ring

WHAT_IF = "/what_if"


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose last minutes are 16 requests at once in four slots."""
    with running(folder, tmp_path_factory.mktemp("log") / "engine", "seconds_per_step=0.01") as started:
        settings = {"max_num_seqs": 4}
        started.client.put(started.url + "/admin/scheduling", content=json.dumps(settings), headers=JSON)
        body = {"prompt": [[10 + number] * 5 for number in range(16)], "max_tokens": 12, "ignore_eos": True}
        started.post("/v1/completions", body, **{"X-Request-Id": "r"})
        yield started


def ask(server: Server, body: object) -> httpx.Response:
    return server.client.post(server.url + WHAT_IF, content=json.dumps(body), headers=JSON, timeout=60)


def test_more_slots_would_have_started_requests_earlier(server: Server):
    answer = ask(server, {"changes": {"max_num_seqs": 16}, "ttft_ms": 10_000, "request_id": "cmpl-r-15"})
    assert answer.status_code == 200
    found = answer.json()
    figures = found["groups"]["all requests"]
    assert found["requests"] == 16 == figures["replayed"]["served"] and figures["measured"]["ttft_p99"] > 0.2
    assert 1 / 4 < figures["replayed"]["ttft_p99"] / figures["measured"]["ttft_p99"] < 4  # the machine may be busy
    assert figures["what_if"]["ttft_p99"] < figures["replayed"]["ttft_p99"] / 2
    assert found["request"]["id"].startswith("cmpl-r-15") and found["settings"]["max_num_seqs"] == 16
    assert server.get("/admin/scheduling").json()["max_num_seqs"] == 4, "nothing has changed"


@pytest.mark.parametrize(("body", "said"), [
    ({"changes": {"slots": 2}}, "there is no scheduling setting"),
    ({"changes": {"max_num_seqs": 0}}, "max_num_seqs"),
    ({"changes": {}, "ttft_ms": 0}, "ttft_ms"),
    ({"changes": {"max_num_seqs": 1 << 70}}, "changes"),
    ({"changes": {"tiers": []}}, "changes no tiers"),
    ({"changes": {}, "request_id": "none"}, "no request"),
    ({}, "changes"),
])
def test_what_cannot_be_asked_is_a_400_in_one_line(server: Server, body: object, said: str):
    answer = ask(server, body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_it_is_the_operators(server: Server):
    answer = server.client.post(server.url + WHAT_IF, content="{}", headers=JSON | {"X-Forwarded-For": "10.0.0.1"})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "admin_key_needed"


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Programs that use whole processors meanwhile, and end by themselves."""
    command = [sys.executable, "-c", "import time\nend = time.monotonic() + 100\nwhile time.monotonic() < end: pass"]
    programs = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_beside_programs_that_use_every_processor_there_is_an_answer_or_an_estimate(server: Server):
    with busy(2 * len(os.sched_getaffinity(0))):
        answer = ask(server, {"changes": {"max_num_seqs": 16}})
    if answer.status_code == 503:
        error = answer.json()["error"]
        assert error["code"] == "what_if_late" and int(answer.headers["retry-after"]) > 0, error
    else:
        assert answer.status_code == 200 and 0 < answer.json()["seconds"] <= answer.json()["held_seconds"]


# -- in parts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    """The log of a simulated server."""
    path = tmp_path_factory.mktemp("log") / "events"
    assert main(["simulate", "--machine", "xeon", "--model", str(builtin.path()), "--max-num-seqs", "4",
                 "--num-prompts", "300", "--input-lengths", "uniform:4:20", "--output-lengths", "uniform:4:12",
                 "--arrivals", "poisson:100", "--seed", "3", "--event-log", str(path)]) == 0
    found = Ring()
    for entry in read_file(path):
        found.append(entry, line_of(entry))
    return found


def replayed(ring: Ring, changes: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server whose ring this is."""

    async def whole() -> dict[str, Any]:
        what_if = WhatIf(BatchedObserver([]), ring)
        try:
            return await what_if.answer("", WhatIfRequest(changes=changes))
        finally:
            what_if.close()

    return asyncio.run(whole())


MORE_SLOTS = {"max_num_seqs": 4}


def patient(monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
    """Questions have a minute and a half, but for these times: the machine may be busy."""
    for name, seconds in ({"ANSWERED": 90.0, "ENDS": 90.0, "WANTED": 90.0} | times).items():
        monkeypatch.setattr(what_if_replay, name, seconds)
    monkeypatch.setattr(what_if_replay, "LIMITS", msgspec.structs.replace(what_if_replay.LIMITS, seconds=180.0))


def test_a_part_is_replayed_first_and_then_all_that_fits(ring: Ring, monkeypatch: pytest.MonkeyPatch):
    patient(monkeypatch)
    monkeypatch.setattr(what_if_replay, "FIRST", ring.size // 4)
    answer = replayed(ring, MORE_SLOTS)
    assert answer["requests"] == 300 and answer["seconds"] == answer["held_seconds"]


def test_without_time_for_more_the_latest_part_is_the_answer_and_says_so(ring: Ring, monkeypatch: pytest.MonkeyPatch):
    patient(monkeypatch, WANTED=0.001)
    monkeypatch.setattr(what_if_replay, "FIRST", ring.size // 4)
    answer = replayed(ring, MORE_SLOTS)
    assert 0 < answer["requests"] < 150 and 0 < answer["seconds"] < answer["held_seconds"] / 2
    assert answer["groups"]["all requests"]["measured"]["served"] == answer["requests"]


@pytest.mark.parametrize(("limit", "says"), [
    ("ENDS", "even its latest part would take about"), ("ANSWERED", "did not come to its end")])
def test_without_time_for_a_part_there_is_an_estimate(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, limit: str, says: str,
):
    patient(monkeypatch, **{limit: 0.001})
    with pytest.raises(ApiError, match=says) as found:
        replayed(ring, MORE_SLOTS)
    assert found.value.status == 503 and found.value.code == "what_if_late" and found.value.retry_after > 0


def test_questions_wait_for_each_other_no_longer_than_leaves_time_for_an_answer(
    ring: Ring, monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(what_if_replay, "TURN", 0.001)

    async def two() -> list[dict[str, Any] | BaseException]:
        what_if = WhatIf(BatchedObserver([]), ring)
        try:
            return await asyncio.gather(*[what_if.answer(name, WhatIfRequest(changes=MORE_SLOTS)) for name in "ab"],
                                        return_exceptions=True)
        finally:
            what_if.close()

    _, second = asyncio.run(two())
    assert isinstance(second, ApiError) and second.code == "what_if_busy" and second.retry_after >= 5

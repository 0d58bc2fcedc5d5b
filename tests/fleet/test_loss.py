"""A replica that dies or freezes: no request hangs, none is answered twice, and the fleet mends itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, counted, eventually
from support.scale_door import Behind, behind

SLOW = "seconds_per_step=0.02"
LONG = 100  # tokens: two seconds


def ask(number: int, count: int = LONG, **more: Any) -> dict[str, Any]:
    return {"prompt": [40 + number], "max_tokens": count, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True} | more


def stream_of(two: Behind, body: dict[str, Any], begun: threading.Event | None = None) -> tuple[list[int], str]:
    """The tokens of a stream, and "done", or the code of the error that ended it."""
    tokens: list[int] = []
    with two.door.client.stream("POST", two.door.url + "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        if response.status_code != 200:
            return [], json.loads("".join(lines))["error"]["code"]
        for line in lines:
            if line == "data: [DONE]":
                return tokens, "done"
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    rest = [one for one in lines if one]
                    assert rest == ["data: [DONE]"]
                    return tokens, event["error"]["code"]
                tokens += event["choices"][0]["token_ids"]
                if begun is not None:
                    begun.set()
    raise AssertionError("the stream ended without an end")


def test_streams_with_output_end_with_an_error_and_others_go_elsewhere(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, SLOW) as two, ThreadPoolExecutor(16) as pool:
        begun = [threading.Event() for _ in range(6)]
        streams = [pool.submit(stream_of, two, ask(number, 250), event) for number, event in enumerate(begun)]
        wholes = [pool.submit(two.door.post, "/v1/completions", ask(50 + number)) for number in range(6)]
        for event in begun:
            assert event.wait(120)
        eventually(lambda: two.replicas[0].get("/health").json()["num_live"] > 3)
        engine = two.replicas[0].engine_pid
        two.replicas[0].process.kill()  # before its engine, whose loss it would report
        with contextlib.suppress(ProcessLookupError):  # it ends with its server
            os.kill(engine, signal.SIGKILL)
        ends = [one.result() for one in streams]
        assert {end for _, end in ends} == {"done", "replica_lost"}
        for number, (tokens, end) in enumerate(ends):
            assert tokens == counted(40 + number, 250)[: len(tokens)] and tokens
            assert (len(tokens) == 250) == (end == "done")
        for number, one in enumerate(wholes):
            assert one.result().json()["choices"][0]["token_ids"] == counted(90 + number, LONG)
        assert "slotwise:router_rerouted_requests_total 0" not in two.door.get("/metrics").text
        eventually(lambda: two.num_up() == 1)
        assert stream_of(two, ask(1, 5)) == (counted(41, 5), "done")


HELLO = [{"role": "user", "content": "hello"}]


ROUTES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/completions", {"prompt": [40], "max_tokens": 200}, "completion_tokens"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 200}, "output_tokens"),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 200}, "output_tokens"))


def test_an_engine_that_dies_within_its_server_is_the_same_to_clients(folder: Path, tmp_path: Path) -> None:
    """Requests go to the replicas in turn: some of each route are at the one that is lost."""
    with behind(folder, tmp_path, SLOW) as two, ThreadPoolExecutor(12) as pool:
        wholes = [(pool.submit(two.door.post, path, body | {"ignore_eos": True}), count)
                  for path, body, count in ROUTES for _ in range(4)]
        eventually(lambda: two.replicas[0].get("/health").json()["num_live"] > 4)
        os.kill(two.replicas[0].engine_pid, signal.SIGKILL)
        for one, count in wholes:
            answer = one.result()
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"][count] == 200
        eventually(lambda: two.num_up() == 2)  # its server has started another engine


@pytest.mark.slow
def test_a_frozen_replica_is_given_up(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, SLOW) as two, ThreadPoolExecutor(8) as pool:
        begun = [threading.Event() for _ in range(8)]  # one without output would go to the other replica
        streams = [pool.submit(stream_of, two, ask(number, 400), event) for number, event in enumerate(begun)]
        for event in begun:
            assert event.wait(120)
        eventually(lambda: two.replicas[0].get("/health").json()["num_live"] > 0)
        os.kill(two.replicas[0].process.pid, signal.SIGSTOP)
        try:
            ends = [one.result() for one in streams]
            assert {end for _, end in ends} <= {"done", "replica_lost"} and "replica_lost" in {end for _, end in ends}
            assert stream_of(two, ask(1, 5))[1] == "done"
        finally:
            os.kill(two.replicas[0].process.pid, signal.SIGCONT)
        eventually(lambda: two.num_up() == 2)
        assert [stream_of(two, ask(number, 5))[1] for number in range(4)] == ["done"] * 4


def test_a_request_that_fails_everywhere_fails_once(folder: Path, tmp_path: Path) -> None:
    """A prompt that kills engines is tried on two replicas, and not on a third."""
    dying = 399
    with behind(folder, tmp_path, "backoff=0.1", number=3) as three:
        answer = three.door.post("/v1/completions", ask(0, 5, prompt=[dying]))
        assert answer.status_code >= 500
        eventually(lambda: sum(map(_num_starts, three.replicas)) == 3 + 2)
        eventually(lambda: three.num_up() == 3)


def _num_starts(replica: Server) -> int:
    """Engines that became ready in a replica."""
    return next(int(float(line.split()[-1])) for line in replica.get("/metrics").text.splitlines()
                if line.startswith("slotwise:engine_starts_total"))


def test_a_door_that_is_stopped_lets_requests_end(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, SLOW) as two, ThreadPoolExecutor(2) as pool:
        begun = threading.Event()
        stream = pool.submit(stream_of, two, ask(1), begun)
        assert begun.wait(120)
        two.door.process.terminate()
        eventually(lambda: _refuses(two))
        assert stream.result() == (counted(41, LONG), "done")
        assert two.door.process.wait(120) == 0


def _refuses(two: Behind) -> bool:
    answer = two.door.post("/v1/completions", {"prompt": [40]})
    return answer.status_code == 503 and answer.json()["error"]["code"] == "draining"

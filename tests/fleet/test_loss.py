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

import httpx
import pytest
from support.live_server import ENDLESS_CONTEXT, Server, counted, eventually, frozen
from support.scale_door import Behind, behind

SLOW = "seconds_per_step=0.02"
LONG = 100  # tokens: two seconds
FOREVER = 30_000  # tokens: ten minutes


def ask(number: int, count: int = LONG, **more: Any) -> dict[str, Any]:
    return {"prompt": [40 + number], "max_tokens": count, "ignore_eos": True, "temperature": 0,
            "return_token_ids": True} | more


def num_live(replica: Server) -> int:
    """Requests that are not answered yet."""
    return int(replica.get("/health").json()["num_live"])


def stream_of(two: Behind, body: dict[str, Any], begun: threading.Event | None = None,
              may_leave: threading.Event | None = None) -> tuple[list[int], str]:
    """The tokens of a stream, and "done", "left", or the code of the error that ended it.

    Args:
        begun: set with its first tokens.
        may_leave: its client leaves with the first tokens after it was set.
    """
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
                if may_leave is not None and may_leave.is_set():
                    return tokens, "left"
                if begun is not None:
                    begun.set()
    raise AssertionError("the stream ended without an end")


def test_streams_with_output_end_with_an_error_and_others_go_elsewhere(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, SLOW, ENDLESS_CONTEXT) as two, ThreadPoolExecutor(16) as pool:
        begun, may_leave = [threading.Event() for _ in range(6)], threading.Event()
        streams = [pool.submit(stream_of, two, ask(number, FOREVER), event, may_leave)
                   for number, event in enumerate(begun)]
        for event in begun:
            assert event.wait(120)
        lost, engine = two.replicas[0], two.replicas[0].engine_pid
        num_lost = num_live(lost)
        assert 0 < num_lost < 6
        os.kill(engine, signal.SIGSTOP)  # so whole responses cannot end there
        wholes = [pool.submit(two.door.post, "/v1/completions", ask(50 + number, 5)) for number in range(6)]
        eventually(lambda: num_live(lost) > num_lost)
        lost.process.kill()  # before its engine, whose loss it would report
        with contextlib.suppress(ProcessLookupError):  # it ends with its server
            os.kill(engine, signal.SIGKILL)
        eventually(lambda: sum(one.done() for one in streams) == num_lost)
        may_leave.set()
        ends = [one.result() for one in streams]
        assert sorted(end for _, end in ends) == ["left"] * (6 - num_lost) + ["replica_lost"] * num_lost
        for number, (tokens, _) in enumerate(ends):
            assert tokens and tokens == counted(40 + number, FOREVER)[: len(tokens)]
        for number, one in enumerate(wholes):
            assert one.result().json()["choices"][0]["token_ids"] == counted(90 + number, 5)
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
    with behind(folder, tmp_path, SLOW, ENDLESS_CONTEXT) as two, ThreadPoolExecutor(8) as pool:
        begun, may_leave = [threading.Event() for _ in range(8)], threading.Event()
        streams = [pool.submit(stream_of, two, ask(number, FOREVER), event, may_leave)
                   for number, event in enumerate(begun)]
        for event in begun:  # one without output would go to the other replica
            assert event.wait(120)
        num_lost = num_live(two.replicas[0])
        with frozen(two.replicas[0].process.pid):
            eventually(lambda: sum(one.done() for one in streams) == num_lost)
            may_leave.set()
            assert [one.result()[1] for one in streams].count("replica_lost") == num_lost > 0
            assert stream_of(two, ask(1, 5))[1] == "done"
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
        with frozen(two.replicas[0].engine_pid), frozen(two.replicas[1].engine_pid):  # until then it cannot end
            two.door.process.terminate()
            eventually(lambda: _refuses(two))
        assert stream.result() == (counted(41, LONG), "done")
        assert two.door.process.wait(120) == 0


def _refuses(two: Behind) -> bool:
    try:
        answer = two.door.client.post(two.door.url + "/v1/completions", json={"prompt": [40]}, timeout=2)
    except httpx.TimeoutException:  # it was accepted, and waits for an engine
        return False
    return answer.status_code == 503 and answer.json()["error"]["code"] == "draining"


def test_a_change_of_all_replicas_is_not_done_while_one_of_them_is_lost(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path) as two, ThreadPoolExecutor(1) as pool:
        lost, other = two.replicas
        os.kill(lost.process.pid, signal.SIGSTOP)
        change = pool.submit(two.door.client.put, two.door.url + "/admin/scheduling", json={"max_num_seqs": 3})
        eventually(lambda: other.get("/admin/scheduling").json()["max_num_seqs"] == 3)
        lost.process.kill()
        answer = change.result(120)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
        of_lost, of_other = (one.url.removeprefix("http://") for one in two.replicas)
        assert answer.json()["error"]["message"] == f"replica {of_lost} was lost (done by replica {of_other})"

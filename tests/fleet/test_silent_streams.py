"""Signs of life through the front door: passed on, no output, and no reason to give a request up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_server import Server, counted, eventually, unanswered
from support.scale_door import Behind, behind

ONE_SLOT = ("max_num_seqs=1", "seconds_per_step=0.3", "silence_timeout=0.02", "max_num_queued_reqs=1", "backoff=0.1")
BLOCKING = {"prompt": [40], "max_tokens": 500, "ignore_eos": True}
BODY = {"prompt": [60], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "stream": True}
COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
BODIES = {COMPLETIONS: BODY, MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3,
                                        "ignore_eos": True, "stream": True}}
SIGNS = {COMPLETIONS: [": waiting"], MESSAGES: ["event: ping", 'data: {"type":"ping"}']}


@contextlib.contextmanager
def blocked(two: Behind) -> Iterator[dict[str, contextlib.ExitStack]]:
    """The only slot of each replica is taken, until its stack, by the replica's URL, is closed."""
    with contextlib.ExitStack() as stack:
        found = {}
        for replica in two.replicas:
            found[replica.url] = stack.enter_context(contextlib.ExitStack())
            found[replica.url].enter_context(unanswered(replica, COMPLETIONS, BLOCKING))
            eventually(lambda replica=replica: replica.get("/health").json()["num_live"] == 1)
        yield found


@contextlib.contextmanager
def waiting(two: Behind, path: str = COMPLETIONS, **more: Any) -> Iterator[tuple[Iterator[str], Server, Server]]:
    """The lines of a stream that has begun with signs of life; the replica where it waits, and the other one."""
    with two.door.client.stream("POST", two.door.url + path, json=BODIES[path] | more) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines) for _ in range(3 * len(SIGNS[path]))] == SIGNS[path] * 3
        there, other = [sorted(two.replicas, key=lambda one: one.get("/health").json()["num_live"])[i] for i in (-1, 0)]
        yield (line for line in lines if line not in SIGNS[path]), there, other


def tokens_of(lines: Iterator[str]) -> list[int]:
    events = [line.removeprefix("data: ") for line in lines]
    assert events.pop() == "[DONE]"
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


@pytest.mark.parametrize(("ends", "path"), [("the replica", COMPLETIONS), ("its engine", MESSAGES)])
def test_a_stream_that_has_only_signs_of_life_goes_elsewhere(
        folder: Path, tmp_path: Path, ends: str, path: str) -> None:
    with (behind(folder, tmp_path, *ONE_SLOT) as two, blocked(two) as others,
          waiting(two, path) as (lines, there, other)):
        if ends == "the replica":
            there.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it ends with its server
            os.kill(there.engine_pid, signal.SIGKILL)
        eventually(lambda: other.get("/health").json()["num_live"] == 2)
        others[other.url].close()
        if path == COMPLETIONS:
            assert tokens_of(lines) == counted(60, 3)
        else:
            events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
            assert events[0] == "message_start" and events[-1] == "message_stop" and "error" not in events


def test_a_sign_of_life_is_not_taken_for_the_first_output(folder: Path, tmp_path: Path) -> None:
    """With its first output the router takes a prompt to be computed, and drops it once a later report lacks it."""
    quick = [one.replace("seconds_per_step=0.3", "seconds_per_step=0.05") for one in ONE_SLOT]
    settings = ("enable_prefix_caching=1", *quick, "max_num_queued_reqs=2")
    with (behind(folder, tmp_path, *settings) as two, blocked(two),
          waiting(two, prompt=[60] * 400) as (_, there, _), unanswered(there, COMPLETIONS, BLOCKING)):

        def known() -> dict[str, Any]:
            return next(one for one in two.states() if one["url"] == there.url)

        eventually(lambda: known()["num_waiting"] == 2)  # told behind the signs
        assert known()["num_cached_pieces"] >= 4


def test_a_status_from_elsewhere_is_an_event_of_the_stream(folder: Path, tmp_path: Path) -> None:
    with (behind(folder, tmp_path, *ONE_SLOT) as two, blocked(two), waiting(two) as (lines, there, other),
          unanswered(other, COMPLETIONS, BLOCKING)):
        eventually(lambda: other.get("/health").json()["num_live"] == 2)  # as many as its slot and queue hold
        there.process.kill()
        error, done = [line.removeprefix("data: ") for line in lines]
    assert json.loads(error)["error"]["code"] == "queue_full" and done == "[DONE]"


def test_a_replica_that_is_lost_without_another_one_is_an_event_of_the_stream(folder: Path, tmp_path: Path) -> None:
    with behind(folder, tmp_path, *ONE_SLOT, number=1) as one, blocked(one), waiting(one) as (lines, there, _):
        there.process.kill()
        error, done = [line.removeprefix("data: ") for line in lines]
    assert json.loads(error)["error"]["code"] == "replica_lost" and done == "[DONE]"

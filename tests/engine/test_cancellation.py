"""A request ended from outside, in every state it can be in: its blocks come back, and nobody else's tokens change."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from support.toy import EOS, alone, next_token, scheduler

from slotwise.core.params import SamplingSpec
from slotwise.core.request import Request, RequestSpec, State
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Finish

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=14, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
TARGET = "target"
LENGTH = 12


class Scene:
    """An engine, the requests in it, and what each has been given."""

    def __init__(self, depth: int) -> None:
        ticks = count()
        self.scheduler = scheduler(LIMITS)
        self.engine = Engine(
            self.scheduler, FakeExecutor(LIMITS.block_size, next_token), lambda: next(ticks), (EOS,), depth=depth)
        self.given: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.expected: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], length: int = LENGTH) -> None:
        params = SamplingSpec(max_tokens=length, ignore_eos=True)
        self.expected[name] = alone(Request(name, RequestSpec(prompt, params), (EOS,)), LIMITS)
        self.given[name], self.ends[name] = [], []
        self.engine.handle(Add(name, RequestSpec(prompt, params)))

    def step(self) -> None:
        record = self.engine.step() if self.engine.has_work else self.engine.idle_record()
        self.scheduler.check()
        if record is None:
            return
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            self.given[name] += tokens
        for end in record.ended:
            self.ends[end.request_id].append(end.reason)

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(200):
            if holds():
                return
            self.step()
        raise AssertionError("it never came to that")

    @property
    def target(self) -> Request | None:
        return next((request for request in self.scheduler.requests() if request.request_id == TARGET), None)

    def check_after(self) -> None:
        """The target was ended a moment ago."""
        self.step()
        self.step()
        assert self.target is None and self.ends[TARGET] == ["abort"]
        held = {block for request in self.scheduler.requests() for block in request.blocks}
        assert self.scheduler.num_free_blocks == LIMITS.num_blocks - len(held)
        self.until(lambda: not self.engine.has_work)
        self.step()
        assert self.scheduler.num_free_blocks == LIMITS.num_blocks
        for name, expected in self.expected.items():
            if name == TARGET:
                assert self.given[name] == expected[: len(self.given[name])] != expected
            else:
                assert self.given[name] == expected and self.ends[name] == ["length"], name


def queued(scene: Scene) -> None:
    for name in "abc":
        scene.add(name, [3, ord(name) % 20])
    scene.add(TARGET, [7, 7])
    scene.step()
    assert scene.target is not None and scene.target.state is State.WAITING


def never_planned(scene: Scene) -> None:
    """Its arrival and its end are taken in between the same two steps."""
    scene.add("a", [3, 1])
    scene.step()
    scene.add(TARGET, [7, 7])


def prefilling(scene: Scene) -> None:
    scene.add("a", [3, 1])
    scene.add(TARGET, [7] * 30)
    scene.add("b", [5] * 9)
    scene.until(lambda: scene.target is not None and 0 < scene.target.num_computed < scene.target.num_prompt - 8)


def decoding(scene: Scene) -> None:
    for name in ("a", TARGET, "b"):
        scene.add(name, [3, len(name), ord(name[0]) % 20])
    scene.until(lambda: scene.target is not None and scene.target.num_output >= 4)


def preempted(scene: Scene) -> None:
    scene.add("a", [3] * 12, 30)
    scene.add("b", [4] * 12, 24)
    scene.add(TARGET, [5] * 6, 30)
    scene.until(lambda: scene.target is not None and scene.target.state is State.PREEMPTED)


SITUATIONS = [queued, never_planned, prefilling, decoding, preempted]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_abort_frees_its_places_within_two_steps(situation: Callable[[Scene], None], depth: int) -> None:
    scene = Scene(depth)
    situation(scene)
    scene.engine.handle(Finish(TARGET, "abort"))
    scene.engine.handle(Finish(TARGET, "abort"))  # the client went away, too
    scene.check_after()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_of_one_that_ends_in_this_very_step(depth: int) -> None:
    """With a step in flight, its last token is being computed when the abort comes; without, it has just ended."""
    scene = Scene(depth)
    scene.add("a", [3, 1])
    scene.add(TARGET, [7, 7], 3)
    scene.add("b", [5, 2])
    scene.until(lambda: scene.target is None or scene.target.num_output + scene.target.pending == 3)
    scene.engine.handle(Finish(TARGET, "abort"))
    scene.until(lambda: not scene.engine.has_work)
    scene.step()
    assert scene.ends == {"a": ["length"], "b": ["length"], TARGET: ["abort" if depth else "length"]}
    assert scene.given["a"] == scene.expected["a"] and scene.given["b"] == scene.expected["b"]
    assert scene.scheduler.num_free_blocks == LIMITS.num_blocks


def test_an_abort_of_nobody_is_nothing() -> None:
    scene = Scene(0)
    scene.engine.handle(Finish("nobody", "abort"))
    assert scene.engine.idle_record() is None

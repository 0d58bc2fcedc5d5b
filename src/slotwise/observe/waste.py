"""Wasted tokens and empty slots of a step, and the reasons of requests that are not in it.

Accepts steps of the engine (`engine.messages.StepRecord`) and of a log (`observe.event_log.Step`) alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from slotwise.core import reasons

NS = 1e-9
DECODE, MIXED, PREFILL = KINDS = ("decode", "mixed", "prefill")
STEP_UNDER_WAY = "step_under_way"  # it arrived during a step, and is in no plan yet
WAITS = (
    STEP_UNDER_WAY, reasons.NO_SLOT, reasons.NO_BLOCKS, reasons.TOKEN_BUDGET, reasons.SHORT_STEP, reasons.TIME_BUDGET,
    reasons.TIER_CAP, reasons.FIRST_TOKEN, reasons.BATCH_RUNNING, reasons.WINDOW_OPEN, reasons.ONE_AT_A_TIME)
STALLS = (
    reasons.TOKEN_BUDGET, reasons.SHORT_STEP, reasons.TIME_BUDGET, reasons.FIRST_TOKEN,
    reasons.ENDING, reasons.PROMPTS_ALONE)


class Columns(Protocol):
    """The columns of a step used here; requests may be named by any type."""

    counts: Sequence[int]
    padding: Sequence[int]
    held: Sequence[int]
    refused: Sequence[tuple[Any, str]]
    stop: Any  # (reason, first_blocked, num_behind, ...) or None


class Times(Columns, Protocol):
    step: int
    started_ns: int
    taken: Sequence[int]
    num_waiting: int


def kind(step: Columns) -> str:
    """`decode`: a token for each row; `prefill`: more than one for each; else `mixed`."""
    if max(step.counts) == 1:
        return DECODE
    return PREFILL if min(step.counts) > 1 else MIXED


def held_tokens(step: Columns) -> int:
    """Returns the tokens computed for rows that already have their last token."""
    return sum([step.counts[row] for row in step.held]) if step.held else 0


def why_waiting(step: Columns) -> dict[str, int]:
    """Returns the number of requests that wait for a slot, by reason; those not examined have the stop's reason."""
    if step.stop is None:
        return {}
    reason, first, num_behind = step.stop[:3]
    waiting = {reason: 1 + num_behind}
    for _, other in _refused_from(step, first)[1:]:
        if other != reason:
            waiting[other] = waiting.get(other, 0) + 1
            waiting[reason] -= 1
    return waiting


def why_stalled(step: Columns) -> dict[str, int]:
    """Returns the number of running requests without a row in this step, by reason."""
    if not step.refused:
        return {}
    stalled: dict[str, int] = {}
    waiting = {name for name, _ in _refused_from(step, step.stop[1])} if step.stop is not None else ()
    for name, reason in step.refused:
        if name not in waiting:
            stalled[reason] = stalled.get(reason, 0) + 1
    return stalled


def _refused_from(step: Columns, first: Any) -> list[tuple[Any, str]]:
    """Returns the examined waiting requests, in order; running ones come before `first`, or have `PROMPTS_ALONE`."""
    names = [name for name, _ in step.refused]
    return [entry for entry in step.refused[names.index(first):] if entry[1] != reasons.PROMPTS_ALONE]


class Waits:
    """Seconds that requests wait for a slot, by reason: from arrival to the admitting plan, added at each plan."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(WAITS, 0.0)
        self.now: dict[str, int] = {}  # requests that the last plan left waiting
        self._since = 0
        self._sent: deque[tuple[int, bool]] = deque()  # commands not yet handled: when, an arrival?
        self._unseen: list[tuple[int, int]] = []  # arrivals in no plan yet: sent, handled

    def commanded(self, now_ns: int, *, is_arrival: bool) -> None:
        self._sent.append((now_ns, is_arrival))

    def stepped(self, step: Times) -> None:
        now = step.started_ns
        for reason, count in self.now.items():
            self._wait(reason, count * max(0, now - self._since))
        self._since = now
        for taken in step.taken:
            sent, is_arrival = self._sent.popleft()
            if is_arrival:
                self._unseen.append((sent, taken))
        if step.step >= 0:
            self._see(now)
            self.now = why_waiting(step)
        elif not step.num_waiting:
            self._see(now)
            self.now = {}

    def lost(self, now_ns: int) -> None:
        """Drops all waiting requests after the engine was lost."""
        self._sent.clear()
        self._unseen.clear()
        self.now = {}
        self._since = now_ns

    def _see(self, now: int) -> None:
        """Attributes the wait of arrivals handled before the plan that started at `now`."""
        if self._unseen:
            seen = [sent for sent, taken in self._unseen if taken <= now]
            self._wait(STEP_UNDER_WAY, sum([now - sent for sent in seen]))
            del self._unseen[:len(seen)]

    def _wait(self, reason: str, nanoseconds: int) -> None:
        self.seconds[reason] = self.seconds.get(reason, 0.0) + nanoseconds * NS

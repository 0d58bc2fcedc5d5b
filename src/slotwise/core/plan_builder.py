"""A plan in the making: columns that grow row by row, and the token budget that shrinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slotwise.core.host_cache import Copies
from slotwise.core.reasons import NO_BLOCKS, TOKEN_BUDGET
from slotwise.core.request import Request
from slotwise.core.step import Decision, NewBlocks, NewRequest, StepPlan, StepResult, Stop
from slotwise.core.step_budget import StepBudget


class InFlight(NamedTuple):
    """A step that is planned and not committed: the requests of its rows, each in the epoch it was planned in."""

    plan: StepPlan
    requests: tuple[Request, ...]
    epochs: tuple[int, ...]

    def declared(self, result: StepResult, ended: set[str]) -> Iterator[tuple[Request, str]]:
        """Requests that the executor ended, complete or unable to sample, but for the `ended`."""
        for rows, reason in ((result.complete, "stop"), (result.failed, "error")):
            for row in rows:
                request = self.requests[row]
                if not request.reason and request.request_id not in ended:
                    yield request, reason


class PlanBuilder:
    """Filled by one `Scheduler.plan`, then closed into a StepPlan."""

    __slots__ = (
        "budget", "deferred", "has_chunk", "held", "is_pressed", "isolated_steps", "lanes", "new_blocks",
        "new_requests", "now", "padding", "paused", "preempted", "refused", "rows", "shortage", "starting", "step",
        "stop", "time",
    )

    def __init__(self, step: int, now: float, budget: int, time: StepBudget | None = None) -> None:
        self.step = step
        self.now = now  # seconds
        self.shortage = TOKEN_BUDGET  # why nobody gets more tokens once there are none left
        self.budget = budget  # tokens this step may still take; a prompt that is not cut may take it below zero
        self.time = time  # what it may still compute in the time it has; None: as long as it takes
        self.has_chunk = False  # of a prompt, and there is a limit to its time
        self.starting: list[Request] = []  # for whom others rest
        self.lanes: frozenset[str] = frozenset()  # of those who rest
        self.paused: frozenset[str] = frozenset()  # names of those who run, and rest if any of them begins
        self.isolated_steps = 1  # that this step may be for them, in one
        self.deferred: list[Request] = []  # who run, and whose prompts go on behind those who wait and go before them
        self.rows: list[tuple[Request, int, int, bool]] = []  # request, start, count, samples
        self.padding: tuple[int, ...] = ()
        self.held: list[int] = []
        self.new_requests: list[NewRequest] = []
        self.new_blocks: list[NewBlocks] = []
        self.preempted: list[Decision] = []
        self.is_pressed = False  # somebody had to yield for want of blocks
        self.refused: list[Decision] = []
        self.stop: Stop | None = None

    def add_row(self, request: Request, start: int, count: int) -> None:
        """Plan `count` tokens of `request` from position `start`; at the end of the known ones it will sample."""
        self.budget -= count
        self.rows.append((request, start, count, request.schedule(count)))

    def hold(self, request: Request) -> None:
        """Compute the last token of `request` once more, for nothing: its batch has not drained."""
        self.held.append(len(self.rows))
        self.budget -= 1
        self.rows.append((request, request.num_scheduled - 1, 1, True))

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> list[int]:
        return [count for _, _, count, _ in self.rows]

    def has(self, request: Request) -> bool:
        return any(row[0] is request for row in self.rows)

    def add_blocks(self, request: Request, blocks: tuple[int, ...]) -> None:
        if blocks:
            self.new_blocks.append(NewBlocks(request.slot, blocks))

    def refuse(self, request: Request, reason: str) -> None:
        self.refused.append(Decision(request.request_id, reason))

    def preempt(self, request: Request, reason: str) -> None:
        self.is_pressed |= reason == NO_BLOCKS
        self.preempted.append(Decision(request.request_id, reason))

    def close(self, released_slots: tuple[int, ...], copies: Copies) -> InFlight:
        """The finished plan, with the requests its rows belong to.  Columns are cut here, all at once.

        Args:
            released_slots: slots given back since the last plan.
            copies: between the device and host memory.
        """
        requests, starts, counts, samples = zip(*self.rows, strict=True) if self.rows else ((), (), (), ())
        plan = StepPlan(
            self.step, self.now, released_slots, tuple(self.new_requests), tuple(self.new_blocks),
            tuple([request.request_id for request in requests]), tuple([request.slot for request in requests]),
            starts, counts, samples, self.padding, tuple(self.held),
            tuple(self.preempted), tuple(self.refused), self.stop, *copies)
        return InFlight(plan, requests, tuple([request.epoch for request in requests]))

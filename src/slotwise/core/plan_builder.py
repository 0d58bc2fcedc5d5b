"""PlanBuilder: a StepPlan under construction; and InFlight, a step that is planned and not committed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from slotwise.core.host_cache import Copies
from slotwise.core.reasons import NO_BLOCKS, TOKEN_BUDGET
from slotwise.core.record import (
    Admission,
    CacheLookup,
    Decision,
    FreedBlocks,
    NewBlocks,
    NewRequest,
    Preemption,
    RowKind,
    StepPlan,
    StepResult,
    Stop,
)
from slotwise.core.request import Request
from slotwise.core.step_budget import StepBudget

DECODE = RowKind.DECODE  # looked up once a row

Row = tuple[Request, int, int, int, RowKind]
"""Request, start, count, num_logits, kind."""


class InFlight(NamedTuple):
    """A planned, uncommitted step: its rows' requests, and the epoch in which each was planned."""

    plan: StepPlan
    requests: tuple[Request, ...]
    epochs: tuple[int, ...]

    def failed(self, result: StepResult) -> Iterator[tuple[Request, str]]:
        """Yields the requests whose rows could not sample, with the objections; except those that have ended."""
        for row, objection in zip(result.failed, result.objections or repeat(""), strict=False):
            if not self.requests[row].reason:
                yield self.requests[row], objection


class PlanBuilder:
    """Filled by one `Scheduler.schedule`, row by row, then closed into a StepPlan."""

    __slots__ = (
        "admitted", "budget", "deferred", "draft_limit", "drafts", "has_chunk", "held", "is_adapter_overdue",
        "is_pressed", "isolated_steps", "lanes", "lookups",
        "new_blocks", "new_requests", "now", "padding", "paused", "preempted", "refused", "rows", "shortage",
        "starting", "step", "stop", "time",
    )

    def __init__(self, step: int, now: float, budget: int, time: StepBudget | None = None) -> None:
        self.step = step
        self.now = now  # seconds
        self.shortage = TOKEN_BUDGET  # the reason for refusing rows once `budget` is spent
        self.budget = budget  # tokens left in this step; a prompt computed whole may take it below zero
        self.time = time  # the step's time budget; None: unlimited
        self.has_chunk = False  # the step has a prefill chunk, and a time budget
        # `core/prefill_isolation.py` explains these five.
        self.starting: list[Request] = []  # prompts for which other rows pause
        self.lanes: frozenset[str] = frozenset()  # lanes of the paused requests
        self.paused: frozenset[int] = frozenset()  # ids of running requests that pause if any of `starting` gets tokens
        self.isolated_steps = 1  # number of isolated steps that this one may last for
        self.deferred: list[Request] = []  # running prefills planned after waiting requests that outrank them
        self.rows: list[Row] = []
        self.drafts: dict[int, tuple[int, ...]] = {}  # by row
        self.draft_limit = ""  # why there are no more
        self.padding: tuple[int, ...] = ()
        self.held: list[int] = []
        self.new_requests: list[NewRequest] = []
        self.new_blocks: list[NewBlocks] = []
        self.admitted: list[Admission] = []
        self.lookups: list[CacheLookup] = []
        self.preempted: list[Preemption] = []
        self.is_adapter_overdue = False  # a request was passed often enough while it waited for an adapter's slot
        self.is_pressed = False  # a request was preempted for want of blocks
        self.refused: list[Decision] = []
        self.stop: Stop | None = None

    def add_row(self, request: Request, start: int, count: int, kind: RowKind) -> None:
        """Plan `count` known tokens of `request` from position `start`; the row samples at the last of them."""
        self.budget -= count
        samples = request.schedule(count)
        wants_all = request.computes_whole_prompt and not request.num_output
        self.rows.append((request, start, count, count if wants_all else int(samples), kind))

    def add_drafts(self, row: int, drafts: tuple[int, ...]) -> None:
        """Add `drafts`, to be verified, to a planned row that decodes one token."""
        request, start, _, _, kind = self.rows[row]
        count = 1 + len(drafts)
        self.budget -= len(drafts)
        self.drafts[row] = drafts
        self.rows[row] = request, start, count, count, kind
        request.schedule_drafts(len(drafts))

    def add_chunk(self, start: int, count: int) -> None:
        """Charge a prefill chunk to the time budget."""
        assert self.time is not None
        self.time.add(start, count)
        self.has_chunk = True

    def hold(self, request: Request) -> None:
        """Compute the last token of an ended `request` again: its batch has not ended."""
        self.held.append(len(self.rows))
        self.budget -= 1
        self.rows.append((request, request.num_scheduled - 1, 1, 1, DECODE))

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> list[int]:
        return [row[2] for row in self.rows]

    def has(self, request: Request) -> bool:
        return any(row[0] is request for row in self.rows)

    def refuse(self, request: Request, reason: str) -> None:
        self.refused.append(Decision(request.request_id, reason))

    def preempt(self, request: Request, reason: str, num_lost: int) -> None:
        self.is_pressed |= reason == NO_BLOCKS
        self.preempted.append(Preemption(request.request_id, reason, num_lost))

    def close(
        self, released_slots: tuple[int, ...], freed: tuple[FreedBlocks, ...], expired: tuple[FreedBlocks, ...],
        copies: Copies,
    ) -> InFlight:
        """Returns the finished plan, with the requests of its rows.  Rows become columns here.

        Args:
            released_slots: slots released since the last plan.
            freed: blocks truncated since the last plan.
            expired: blocks that fell behind a window since.
            copies: block copies between device and host memory.
        """
        requests, starts, counts, num_logits, kinds = zip(*self.rows, strict=True) if self.rows else ((),) * 5
        drafts = tuple([self.drafts.get(row, ()) for row in range(len(self.rows))]) if self.drafts else ()
        plan = StepPlan(
            self.step, self.now, released_slots, tuple(self.new_requests), freed, tuple(self.new_blocks),
            tuple([request.request_id for request in requests]), tuple([request.slot for request in requests]),
            starts, counts, drafts, num_logits, kinds, self.padding, tuple(self.held),
            tuple(self.preempted), tuple(self.refused), self.stop, *copies, self.draft_limit, expired,
            tuple(self.admitted), tuple(self.lookups))
        return InFlight(plan, requests, tuple([request.epoch for request in requests]))

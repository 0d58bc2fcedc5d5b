"""Running requests in a step: a token or a prefill chunk for each row, in the policy's order.

If blocks run out, `Preemption.victim` chooses among the rows not yet planned.  A running request without a token is in
the plan's `refused`, with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import length_hint

from slotwise.core.chunking import Chunking
from slotwise.core.drafting import Drafting
from slotwise.core.interfaces import Discipline
from slotwise.core.limits import SchedulerLimits
from slotwise.core.micro_batches import MicroBatches
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.preemption import Preemption
from slotwise.core.reasons import ENDING, TIME_BUDGET, VERIFYING
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step import RowKind

PREFILL, DECODE = RowKind.PREFILL, RowKind.DECODE


class RunningRows:
    """Plans the running requests, under fixed limits and a fixed discipline."""

    def __init__(
        self, table: RequestTable, limits: SchedulerLimits, discipline: Discipline, chunking: Chunking,
        drafting: Drafting, preemption: Preemption,
    ) -> None:
        self._table = table
        self._on_pressure = limits.on_pressure
        self._micro_batches = MicroBatches(table, limits.stages)
        self._discipline = discipline
        self._chunking = chunking
        self._drafting = drafting
        self._preemption = preemption

    @property
    def may_fill(self) -> bool:
        """Whether a step planned now may have rows."""
        return self._micro_batches.may_fill

    def schedule(self, builder: PlanBuilder) -> None:
        """Plan all running rows but those paused or deferred, in the policy's order."""
        running = self.in_order(builder.now)
        if builder.paused or builder.deferred:
            left_out = builder.paused.union(request.request_id for request in builder.deferred)
            running = [request for request in running if request.request_id not in left_out]
        self._add_rows(running, builder)

    def schedule_late(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        """Plan running rows after admissions; in `refused` they are still listed before waiting requests."""
        refused, builder.refused = builder.refused, []
        self._add_rows(running, builder)
        builder.refused += refused

    def in_order(self, now: float) -> Sequence[Request]:
        """Returns the running requests in the order of a plan's rows."""
        policy, running = self._table.policy, tuple(self._table.running.values())
        if not policy.orders_running:
            return running
        return sorted(running, key=lambda request: (policy.running_key(request, now), request.arrival))

    def _add_rows(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        running = self._micro_batches.share(running, builder)
        if builder.time is not None:  # decoding rows are charged before any prefill chunk
            builder.time.add_decodes([
                request.num_scheduled for request in running
                if (known := len(request.tokens) + request.pending) == request.num_scheduled + 1
                and known < request.end and not request.reason and request.pending < 2])
        drafts = self._drafting.proposer is not None
        rows = iter(running)
        for request in rows:  # `length_hint(rows)`: those behind this one
            if builder.preempted and request.state is not State.RUNNING:
                continue  # preempted in this plan, for a row before it
            num_known = len(request.tokens) + request.pending
            count = num_known - request.num_scheduled
            if request.pending > 1 and not request.reason:
                builder.refuse(request, VERIFYING)
                continue
            if request.reason or num_known >= request.end:
                self._add_ended(request, builder)
                continue
            if builder.budget < 1:
                builder.refuse(request, builder.shortage)
                continue
            start = num_known - count
            if count > 1 and not (count := self._chunking.chunk(request, count, builder, length_hint(rows))):
                builder.refuse(request, TIME_BUDGET)
                continue
            kind = DECODE if start >= request.num_at_join else PREFILL
            if drafts and kind is DECODE and self._drafting.waits(request):
                builder.refuse(request, VERIFYING)
                continue
            if start + count > request.capacity and not self._preemption.extend(
                    request, start + count, builder, self._on_pressure):
                continue
            builder.add_row(request, start, count, kind)

    def _add_ended(self, request: Request, builder: PlanBuilder) -> None:
        """Plan a request whose last token is known or in flight: held with its batch, or left out."""
        if request.reason or self._discipline.leaves_together:
            builder.hold(request)
        else:
            builder.refuse(request, ENDING)

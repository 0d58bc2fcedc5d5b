"""Waiting requests in a step: admitted from the head of the queue while `Admission` finds no reason against it.

A few smaller ones may pass a request that waits for blocks, and all of them a request with a grammar that is still
being compiled.
"""

from __future__ import annotations

from slotwise.core.admission import Admission
from slotwise.core.chunking import Chunking
from slotwise.core.interfaces import Discipline
from slotwise.core.kv_manager import Allocation
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.prefill_isolation import goes_before
from slotwise.core.reasons import GRAMMAR_COMPILING, NO_ADAPTER_SLOT, NO_BLOCKS, TIER_CAP
from slotwise.core.request import Request
from slotwise.core.request_table import RequestTable
from slotwise.core.running_rows import RunningRows
from slotwise.core.step import NewRequest, RowKind, Stop

# Requests examined per step behind one that waits for blocks: each costs a prefix lookup, in every step of the wait.
MAX_LOOK = 8
MAX_UNSLOTTED = 64  # requests examined per step that wait for an adapter's slot: a microsecond each


class WaitingRequests:
    """Admits waiting requests, under fixed limits and a fixed discipline."""

    def __init__(
        self, table: RequestTable, discipline: Discipline, admission: Admission, chunking: Chunking,
        running: RunningRows,
    ) -> None:
        self._table = table
        self._discipline = discipline
        self._admission = admission
        self._chunking = chunking
        self._running = running

    def schedule(self, builder: PlanBuilder) -> None:
        """Admit waiting requests from the head of the queue, and record in the plan why the others wait."""
        waiting, admission = self._table.waiting, self._admission
        if not waiting:
            return
        gate = admission.gate(builder.now)
        queue = waiting.walk(builder.now)
        examined: list[Request] = []  # and not admitted
        unslotted: list[Request] = []  # that wait for an adapter's slot: they stop only others that need one
        compiling: Request | None = None  # the first one with a grammar that is
        while all(map(admission.may_be_passed, examined)) and (request := queue.next()) is not None:
            if builder.deferred:
                self._catch_up(builder, request)
            is_open = len(builder.new_requests) < gate.max_new
            decision = admission.decide(request, self._chunking, builder) if is_open else gate.reason
            if isinstance(decision, Allocation):
                self._admit(request, decision, builder)
                for before in examined if not request.adapter else [*examined, *unslotted]:
                    before.num_passed += 1
                continue
            builder.refuse(request, decision)
            if decision == GRAMMAR_COMPILING:
                compiling = compiling or request
                continue
            builder.stop = builder.stop or Stop(
                decision, request.request_id, 0, min(gate.reopens_at, waiting.next_moment))
            if decision == NO_ADAPTER_SLOT and not self._discipline.in_strict_order:
                unslotted.append(request)
                builder.is_adapter_overdue |= not admission.may_be_passed(request)
                if len(unslotted) < MAX_UNSLOTTED:
                    continue
                break
            if decision == TIER_CAP:
                queue.close(request.slo.tier)
                continue
            examined.append(request)
            if decision != NO_BLOCKS or builder.is_pressed or len(examined) > MAX_LOOK:
                break
        if compiling is not None and builder.stop is None:  # it stops no other request
            builder.stop = Stop(GRAMMAR_COMPILING, compiling.request_id, 0, min(gate.reopens_at, waiting.next_moment))
        if builder.stop:
            builder.stop = builder.stop._replace(num_behind=len(waiting) - 1)

    def _admit(self, request: Request, allocation: Allocation, builder: PlanBuilder) -> None:
        self._table.admit(request, allocation, builder.step, builder.now)
        builder.new_requests.append(NewRequest(
            request.request_id, request.slot, tuple(request.tokens), request.num_prompt, request.params, request.seed,
            tuple(sorted(request.stop_ids)), request.output, request.pooling, request.adapter))
        builder.new_blocks += self._table.kv.allocated(request)
        count = self._chunking.first_chunk(request, builder)
        builder.add_row(request, request.num_scheduled, count, RowKind.PREFILL)

    def _catch_up(self, builder: PlanBuilder, request: Request) -> None:
        """Continue deferred prefills that outrank the waiting `request`; reserve a token for each paused row."""
        ahead = [prefill for prefill in builder.deferred
                 if goes_before(self._table.policy, prefill, request, builder.now)]
        if ahead:
            builder.deferred = builder.deferred[len(ahead):]
            builder.budget -= len(builder.paused)
            self._running.schedule_late(ahead, builder)
            builder.budget += len(builder.paused)

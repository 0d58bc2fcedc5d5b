"""Admission: which waiting requests may join a step.

Decides only; the scheduler changes states.  A request is admitted if the discipline's gate is open and slots, token
budget, step time and blocks suffice, checked in this order; a tier's reserved slots are free for its requests only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain

from slotwise.core.chunking import Chunking
from slotwise.core.interfaces import Discipline, Gate, View
from slotwise.core.kv_manager import Allocation
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.prefill_isolation import goes_before
from slotwise.core.reasons import (
    FIRST_TOKEN,
    GRAMMAR_COMPILING,
    NO_ADAPTER_SLOT,
    NO_BLOCKS,
    NO_SLOT,
    OUTRANKED,
    TIER_CAP,
    TIME_BUDGET,
    TOKEN_BUDGET,
)
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable


class Admission:
    """Decisions about waiting requests, under fixed limits and a fixed discipline."""

    def __init__(self, table: RequestTable, limits: SchedulerLimits, discipline: Discipline) -> None:
        self._table = table
        self._limits = limits
        self._discipline = discipline
        self._reserved = {tier.name: tier.slots for tier in limits.tiers if tier.slots}

    def gate(self, now: float) -> Gate:
        """Returns how many requests the discipline admits now."""
        table = self._table
        oldest = next(iter(table.unfinished.values())).arrived_at
        return self._discipline.gate(
            View(len(table.running), len(table.waiting), self._limits.max_num_seqs, oldest), now)

    def decide(self, request: Request, chunking: Chunking, builder: PlanBuilder) -> Allocation | str:
        """Returns the blocks with which `request` may join the step, or the reason why it may not.

        A request preempted in this plan may have a token in flight, and is not admitted again before its commit.
        """
        if request.is_compiling:
            return GRAMMAR_COMPILING
        if request.pending:
            return OUTRANKED
        if not self._table.num_free_slots:
            return NO_SLOT
        if self.num_slots_for(request) < 1:
            return TIER_CAP
        if request.adapter and (builder.is_adapter_overdue or not self.has_adapter_slot(request)):
            return NO_ADAPTER_SLOT
        if builder.budget < 1:
            return builder.shortage
        if builder.lanes and self._table.policy.lane(request) in builder.lanes:
            return FIRST_TOKEN
        allocation = self.allocation(request, builder)
        if allocation is None:
            return NO_BLOCKS
        if len(allocation.on_host) > self._table.kv.host.num_loads_left:
            return TOKEN_BUDGET
        start = allocation.num_computed
        return allocation if chunking.fits(start, len(request.tokens) - start, builder) else TIME_BUDGET

    def has_adapter_slot(self, request: Request) -> bool:
        """Whether a step may have this request beside the running ones: it has at most `max_loras` adapters."""
        if not request.adapter:
            return True
        adapters = {running.adapter for running in self._table.running.values() if running.adapter}
        return request.adapter in adapters or len(adapters) < self._limits.max_loras

    def waits_apart(self, request: Request) -> bool:
        """Whether a request waits for its grammar or for an adapter's slot, which others need not wait for."""
        return request.is_compiling or not self.has_adapter_slot(request)

    def may_be_passed(self, request: Request) -> bool:
        """Whether a later arrival may be admitted before this request, which waits for blocks or an adapter's slot."""
        limit = 0 if self._discipline.in_strict_order else self._limits.max_passes
        return request.state is State.WAITING and request.num_passed < limit

    def next_in_line(self, now: float) -> Request | None:
        """Returns the request to admit first in this step, if blocks suffice; None: no slot, or a closed gate."""
        if not self._table.waiting or not self._table.num_free_slots or self.gate(now).max_new < 1:
            return None
        walk = self._table.waiting.walk(now)
        while (request := walk.next()) is not None and self.waits_apart(request):
            pass
        return request if request is not None and self.num_slots_for(request) > 0 else None

    def num_slots_for(self, request: Request) -> int:
        """Free slots that are not reserved for other tiers."""
        free = min(self._table.num_free_slots, self._limits.max_num_seqs - len(self._table.running))
        if not self._reserved:
            return free
        surplus = self.surplus()
        return free - sum(max(0, -surplus[tier]) for tier in self._reserved if tier != request.slo.tier)

    def surplus(self) -> Counter[str]:
        """By tier: slots in use minus slots reserved; below zero, reserved slots that are unused."""
        used = Counter(request.slo.tier for request in self._table.running.values())
        used.subtract(self._reserved)
        return used

    def needed(self, request: Request) -> Allocation:
        """Returns the blocks that `request` needs to be admitted, whether they are free or not."""
        return self._table.kv.match(request, self._discipline.reserve(request))

    def num_missing_blocks(self, request: Request, needed: Allocation, leaving: Collection[Request]) -> int:
        """Blocks to be freed before `request` may be admitted once `leaving` have left; below 1: none."""
        spare = self._spare(request, len(self._table.running) - len(leaving))
        return self._table.kv.missing(needed, leaving) + spare

    def allocation(self, request: Request, builder: PlanBuilder) -> Allocation | None:
        """Returns blocks for a waiting request; None: too few, or this plan preempted a request for want of them.

        It goes before pins, and before requests that have landed and follow it; before all of these if nothing runs,
        which would free blocks for it.
        """
        if builder.is_pressed:
            return None
        table = self._table
        landed = [] if request.state is State.WAITING_FOR_KV else [
            other for other in table.landings if other is not request and (
                not table.running or goes_before(table.policy, request, other, builder.now))]
        return self._found(request, landed)

    def landing(self, request: Request) -> Allocation | None:
        """Returns blocks for a request WAITING_FOR_KV; None: too few, or its tenant's landings hold their share."""
        needed = self.needed(request)
        if not self._table.landings.allows(request.slo.tenant, sum(needed.ends)):
            return None
        if len(needed.on_host) > self._table.kv.host.num_loads_left:
            return None
        return self._found(request, ())

    def _found(self, request: Request, landed: Collection[Request]) -> Allocation | None:
        """Returns the blocks that a request needs, if they are free or can be had from pins and those `landed`."""
        spare, kv = self._spare(request, len(self._table.running)), self._table.kv
        allocation = self.needed(request)
        kept = {cached.block for cached in chain(*allocation.used)}

        def lacking() -> int:
            return kv.num_lacking(allocation) + spare

        return allocation if self._table.reclaim(lacking, kept, landed) else None

    def _spare(self, request: Request, num_running: int) -> int:
        """Blocks that stay free beside running requests; none where every request reserves its maximum."""
        grows = self._discipline.reserve(request) < request.end - 1
        return self._limits.watermark_blocks if num_running and grows else 0

"""Admission of waiting requests into a step: in the policy's order, through the discipline's gate, within capacity."""

from __future__ import annotations

from collections import Counter

from slotwise.core.chunking import Chunking
from slotwise.core.interfaces import Discipline, Gate, View
from slotwise.core.kv_manager import Allocation
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.reasons import FIRST_TOKEN, NO_BLOCKS, NO_SLOT, OUTRANKED, TIER_CAP, TIME_BUDGET, TOKEN_BUDGET
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step import NewRequest, Stop

MAX_LOOK = 8  # requests examined per step behind one that waits for blocks
MAX_OUTRANKED = 4  # running requests that may be preempted per step for waiting ones


class Admission:
    """Admits waiting requests into one plan after another, under fixed limits and a fixed discipline."""

    def __init__(
        self, table: RequestTable, limits: SchedulerLimits, discipline: Discipline, chunking: Chunking,
    ) -> None:
        self._table = table
        self._limits = limits
        self._discipline = discipline
        self._chunking = chunking
        self._kept = {tier.name: tier.slots for tier in limits.tiers if tier.slots}

    # -- admission -----------------------------------------------------------------------------------------------

    def start(self, builder: PlanBuilder) -> AdmissionPass:
        """Returns a pass over the waiting requests, in the policy's order."""
        return AdmissionPass(self, self._table, builder, self.gate(builder.now))

    def admit(self, request: Request, builder: PlanBuilder) -> str:
        """Admit `request` into the plan.  Returns "" if admitted, else the reason.

        A request preempted in this plan may have a token in flight, and is not admitted again before its commit.
        """
        if request.pending:
            return OUTRANKED
        if not self._table.slots.num_free:
            return NO_SLOT
        if self._free_for(request) < 1:
            return TIER_CAP
        if builder.budget < 1:
            return builder.shortage
        if builder.lanes and self._table.policy.lane(request) in builder.lanes:
            return FIRST_TOKEN
        allocation = self._allocation(request, builder)
        if allocation is None:
            return NO_BLOCKS
        if len(allocation.on_host) > self._table.kv.host.num_loads_left:
            return TOKEN_BUDGET
        start = len(allocation.found) * self._limits.block_size
        if not self._chunking.fits(start, len(request.tokens) - start, builder):
            return TIME_BUDGET
        self._join(request, allocation, builder)
        return ""

    def next_in_line(self, builder: PlanBuilder) -> Request | None:
        """Returns the request to admit first in this step, if blocks suffice; None: no slot, or a closed gate."""
        if not self._table.waiting or not self._table.slots.num_free or self.gate(builder.now).max_new < 1:
            return None
        request = self._table.waiting.walk(builder.now).next()
        return request if request is not None and self._free_for(request) > 0 else None

    def gate(self, now: float) -> Gate:
        """Returns how many requests the discipline admits now."""
        table = self._table
        oldest = next(iter(table.unfinished.values())).arrived_at
        return self._discipline.gate(
            View(len(table.running), len(table.waiting), self._limits.max_num_seqs, oldest), now)

    def _free_for(self, request: Request) -> int:
        """Free slots that are not reserved for other tiers."""
        free = min(self._table.slots.num_free, self._limits.max_num_seqs - len(self._table.running))
        if not self._kept:
            return free
        spare = self._spare()
        return free - sum(max(0, -spare[tier]) for tier in self._kept if tier != request.slo.tier)

    def _spare(self) -> Counter[str]:
        """By tier: slots in use minus slots reserved; below zero, reserved slots that are unused."""
        used = Counter(request.slo.tier for request in self._table.running.values())
        used.subtract(self._kept)
        return used

    def _allocation(self, request: Request, builder: PlanBuilder) -> Allocation | None:
        """Returns blocks for a waiting request; None: too few, or this plan preempted a request for want of them."""
        if builder.is_pressed:
            return None
        reserved = self._discipline.reserve(request)
        grows = reserved < request.end - 1  # else every request reserves its maximum, and no watermark is needed
        spare = self._limits.watermark_blocks if self._table.running and grows else 0
        return self._table.kv.find(request, reserved, spare)

    def may_be_passed(self, request: Request) -> bool:
        """Whether a later arrival may be admitted before this request, which waits for blocks."""
        most = 0 if self._discipline.in_strict_order else self._limits.max_passes
        return request.state is State.WAITING and request.num_passed < most

    def _join(self, request: Request, allocation: Allocation, builder: PlanBuilder) -> None:
        self._table.admit(request, allocation, builder.step, builder.now)
        builder.new_requests.append(NewRequest(
            request.request_id, request.slot, tuple(request.tokens), request.num_prompt, request.params, request.seed,
            tuple(sorted(request.stop_ids))))
        builder.add_blocks(request, tuple(request.blocks))
        count = self._chunking.first(request, builder) or 1  # 0: fewer tokens are predicted to take longer
        builder.add_row(request, request.num_scheduled, count)

    # -- outranking ----------------------------------------------------------------------------------------------

    def make_room(self, builder: PlanBuilder) -> None:
        """Preempt running requests for the first waiting requests without capacity, where the policy allows it.

        Waiting requests are considered in order.  All victims that one of them needs are preempted, or none.
        """
        if self._discipline.leaves_together:
            return
        for _ in range(MAX_OUTRANKED):
            request, before = self._first_without_room(builder)
            victims = self._victims(request, before, builder) if request is not None else []
            if not victims:
                return
            for victim in victims:
                builder.preempt(victim, OUTRANKED)
                self._table.preempt(victim, builder.step, builder.now)

    def _first_without_room(self, builder: PlanBuilder) -> tuple[Request | None, int]:
        """Returns the first waiting request without slot (at the head: or blocks), and its position; None: all fit."""
        if not self._table.waiting:
            return None, 0
        walk = self._table.waiting.walk(builder.now)
        num_free = min(self._table.slots.num_free, max(0, self.gate(builder.now).max_new))
        for before in range(num_free + 1):
            request = walk.next()
            if request is None or min(num_free, self._free_for(request)) <= before:
                break
            if before == 0 and self._allocation(request, builder) is None:
                break
        return request, before

    def _victims(self, request: Request, before: int, builder: PlanBuilder) -> list[Request]:
        """Returns the requests to preempt so that `request`, at queue position `before`, gets a slot and blocks.

        Empty if the victims that the policy allows are not enough.
        """
        policy, spare = self._table.policy, self._spare()
        ranked = sorted(
            (running for running in self._table.running.values() if not running.reason),
            key=lambda running: (policy.victim_key(running, builder.now), running.arrival), reverse=True)
        missing = self._table.kv.missing(request, self._discipline.reserve(request))
        slots = min(self._free_for(request), self.gate(builder.now).max_new) - before
        victims: list[Request] = []
        for running in ranked:
            if (slots >= 1 and missing <= 0) or len(victims) == MAX_OUTRANKED:
                break
            tier = running.slo.tier
            if tier in self._kept and spare[tier] <= 0 and tier != request.slo.tier:
                continue  # its slot is reserved for its tier
            if not policy.preempts(request, running, builder.now):
                continue
            victims.append(running)
            spare[tier] -= 1
            slots += 1
            missing -= len(running.blocks)
        return victims if slots >= 1 and missing <= 0 else []


class AdmissionPass:
    """Iterates over the waiting requests of one step.  A few may pass a request that waits for blocks.

        while (request := admission_pass.next()) is not None:
            admission_pass.examine(request)
    """

    def __init__(self, admission: Admission, table: RequestTable, builder: PlanBuilder, gate: Gate) -> None:
        self._admission = admission
        self._waiting = table.waiting
        self._builder = builder
        self._gate = gate
        self._walk = table.waiting.walk(builder.now)
        self._passed: list[Request] = []  # examined, and not admitted
        self._ended = False

    def next(self) -> Request | None:
        """Returns the next request to examine; None: the pass is over."""
        if self._ended or not all(map(self._admission.may_be_passed, self._passed)):
            return None
        return self._walk.next()

    def examine(self, request: Request) -> None:
        """Admit `request`, or record in the plan why it waits."""
        builder, gate = self._builder, self._gate
        reason = gate.reason if len(builder.new_requests) >= gate.max_new else self._admission.admit(request, builder)
        if not reason:
            for before in self._passed:
                before.num_passed += 1
            return
        builder.refuse(request, reason)
        builder.stop = builder.stop or Stop(
            reason, request.request_id, 0, min(gate.reopens_at, self._waiting.next_moment))
        if reason == TIER_CAP:
            self._walk.close_tier(request.slo.tier)
            return
        self._passed.append(request)
        self._ended = reason != NO_BLOCKS or builder.is_pressed or len(self._passed) > MAX_LOOK

    def close(self) -> None:
        """Record in the plan how many requests wait behind the first one refused."""
        if self._builder.stop:
            self._builder.stop = self._builder.stop._replace(num_behind=len(self._waiting) - 1)

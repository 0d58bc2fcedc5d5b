"""Who of those that wait joins a step: in the policy's order, through the discipline's gate, where there is room."""

from __future__ import annotations

from collections import Counter

from slotwise.core.draft import Draft
from slotwise.core.kv import Seat
from slotwise.core.limits import SchedulerLimits
from slotwise.core.pieces import Pieces
from slotwise.core.plan import Join, Stop
from slotwise.core.reasons import FIRST_TOKEN, NO_BLOCKS, NO_SLOT, OUTRANKED, TIER_CAP, TIME_BUDGET, TOKEN_BUDGET
from slotwise.core.request import Request, State
from slotwise.core.roster import Roster
from slotwise.core.seams import Discipline, Gate, View

MAX_LOOK = 8  # who wait behind one that waits for blocks, and may be examined in a step
MAX_OUTRANKED = 4  # who run and may have to give way in a step


class Admission:
    """Seats those who wait, one draft after another, under limits and a discipline that stay as they are."""

    def __init__(self, roster: Roster, limits: SchedulerLimits, discipline: Discipline, pieces: Pieces) -> None:
        self._roster = roster
        self._limits = limits
        self._discipline = discipline
        self._pieces = pieces
        self._kept = {tier.name: tier.slots for tier in limits.tiers if tier.slots}

    # -- joining -------------------------------------------------------------------------------------------------

    def start(self, draft: Draft) -> AdmissionPass:
        """One pass over the waiting requests, in the policy's order."""
        return AdmissionPass(self, self._roster, draft, self.gate(draft.now))

    def admit(self, request: Request, draft: Draft) -> str:
        """Admit it; or why it cannot be.

        One that gave way in this plan may have a token in flight: it cannot come back before that is known.
        """
        if request.pending:
            return OUTRANKED
        if not self._roster.slots.num_free:
            return NO_SLOT
        if self._free_for(request) < 1:
            return TIER_CAP
        if draft.budget < 1:
            return draft.shortage
        if draft.lanes and self._roster.policy.lane(request) in draft.lanes:
            return FIRST_TOKEN
        seat = self._seat(request, draft)
        if seat is None:
            return NO_BLOCKS
        if len(seat.away) > self._roster.kv.host.num_loads_left:
            return TOKEN_BUDGET
        start = len(seat.found) * self._limits.block_size
        if not self._pieces.fits(start, len(request.tokens) - start, draft):
            return TIME_BUDGET
        self._join(request, seat, draft)
        return ""

    def next_in_line(self, draft: Draft) -> Request | None:
        """Who joins this step if anybody does, and the cache has room."""
        if not self._roster.waiting or not self._roster.slots.num_free or self.gate(draft.now).max_new < 1:
            return None
        request = self._roster.waiting.walk(draft.now).next()
        return request if request is not None and self._free_for(request) > 0 else None

    def gate(self, now: float) -> Gate:
        """How many requests may join now, by the discipline."""
        roster = self._roster
        oldest = next(iter(roster.living.values())).arrived_at
        return self._discipline.gate(
            View(len(roster.running), len(roster.waiting), self._limits.max_num_seqs, oldest), now)

    def _free_for(self, request: Request) -> int:
        """Free slots that are not kept for other tiers than its own."""
        free = min(self._roster.slots.num_free, self._limits.max_num_seqs - len(self._roster.running))
        if not self._kept:
            return free
        spare = self._spare()
        return free - sum(max(0, -spare[tier]) for tier in self._kept if tier != request.terms.tier)

    def _spare(self) -> Counter[str]:
        """Of each tier, the slots it uses beyond those kept for it; below zero: what it does not use of them."""
        used = Counter(request.terms.tier for request in self._roster.running.values())
        used.subtract(self._kept)
        return used

    def _seat(self, request: Request, draft: Draft) -> Seat | None:
        """Room for one who waits; who just yielded must not come straight back, nor anyone in its place."""
        if draft.is_pressed:
            return None
        reserved = self._discipline.reserve(request)
        grows = reserved < request.end - 1  # else all are given what they can ever need, and nothing need be spared
        spare = self._limits.watermark_blocks if self._roster.running and grows else 0
        return self._roster.kv.find(request, reserved, spare)

    def may_be_passed(self, request: Request) -> bool:
        """Whether a later arrival may take a slot before this request, which waits for blocks."""
        most = 0 if self._discipline.in_strict_order else self._limits.max_passes
        return request.state is State.WAITING and request.num_passed < most

    def _join(self, request: Request, seat: Seat, draft: Draft) -> None:
        self._roster.admit(request, seat, draft.step, draft.now)
        draft.joins.append(Join(
            request.request_id, request.slot, tuple(request.tokens), request.num_prompt, request.params, request.seed,
            tuple(sorted(request.stop_ids))))
        draft.grant(request, tuple(request.blocks))
        count = self._pieces.first(request, draft) or 1  # 0: fewer are predicted to take longer
        draft.row(request, request.num_scheduled, count)

    # -- outranking ----------------------------------------------------------------------------------------------

    def make_room(self, draft: Draft) -> None:
        """Let the first of those for whom there is no room take the places of some who run, where the policy says so.

        Those who wait are asked about in their order, and all that one needs is taken or nothing is.
        """
        if self._discipline.leaves_together:
            return
        for _ in range(MAX_OUTRANKED):
            request, before = self._first_without_room(draft)
            victims = self._victims(request, before, draft) if request is not None else []
            if not victims:
                return
            for victim in victims:
                draft.preempt(victim, OUTRANKED)
                self._roster.yield_place(victim, draft.step, draft.now)

    def _first_without_room(self, draft: Draft) -> tuple[Request | None, int]:
        """The first of those who wait who would find no slot, or, at the head, no blocks, and how many go before it;
        None: all find room.
        """
        if not self._roster.waiting:
            return None, 0
        walk = self._roster.waiting.walk(draft.now)
        num_free = min(self._roster.slots.num_free, max(0, self.gate(draft.now).max_new))
        for before in range(num_free + 1):
            request = walk.next()
            if request is None or min(num_free, self._free_for(request)) <= before:
                break
            if before == 0 and self._seat(request, draft) is None:
                break
        return request, before

    def _victims(self, request: Request, before: int, draft: Draft) -> list[Request]:
        """Who must yield so that `request`, with `before` others ahead of it, finds a slot, and blocks; nobody, where
        those who would are not enough.
        """
        policy, spare = self._roster.policy, self._spare()
        ranked = sorted(
            (running for running in self._roster.running.values() if not running.reason),
            key=lambda running: (policy.victim_key(running, draft.now), running.arrival), reverse=True)
        missing = self._roster.kv.missing(request, self._discipline.reserve(request))
        slots = min(self._free_for(request), self.gate(draft.now).max_new) - before
        victims: list[Request] = []
        for running in ranked:
            if (slots >= 1 and missing <= 0) or len(victims) == MAX_OUTRANKED:
                break
            tier = running.terms.tier
            if tier in self._kept and spare[tier] <= 0 and tier != request.terms.tier:
                continue  # its slot is kept for its tier
            if not policy.preempts(request, running, draft.now):
                continue
            victims.append(running)
            spare[tier] -= 1
            slots += 1
            missing -= len(running.blocks)
        return victims if slots >= 1 and missing <= 0 else []


class AdmissionPass:
    """Walks through the waiting requests of one step.  A request that waits for blocks may be passed by a few others.

        while (request := admission_pass.next()) is not None:
            admission_pass.examine(request)
    """

    def __init__(self, admission: Admission, roster: Roster, draft: Draft, gate: Gate) -> None:
        self._admission = admission
        self._waiting = roster.waiting
        self._draft = draft
        self._gate = gate
        self._walk = roster.waiting.walk(draft.now)
        self._passed: list[Request] = []  # examined, and left waiting for blocks
        self._ended = False

    def next(self) -> Request | None:
        """The next request to examine; None: the pass is over."""
        if self._ended or not all(map(self._admission.may_be_passed, self._passed)):
            return None
        return self._walk.next()

    def examine(self, request: Request) -> None:
        """Admit `request`, or write into the plan why it waits."""
        draft, gate = self._draft, self._gate
        reason = gate.reason if len(draft.joins) >= gate.max_new else self._admission.admit(request, draft)
        if not reason:
            for before in self._passed:
                before.num_passed += 1
            return
        draft.refuse(request, reason)
        draft.stop = draft.stop or Stop(
            reason, request.request_id, 0, min(gate.reopens_at, self._waiting.next_moment))
        if reason == TIER_CAP:
            self._walk.close_tier(request.terms.tier)
            return
        self._passed.append(request)
        self._ended = reason != NO_BLOCKS or draft.is_pressed or len(self._passed) > MAX_LOOK

    def close(self) -> None:
        """Write into the plan how many requests wait behind the first that was refused."""
        if self._draft.stop:
            self._draft.stop = self._draft.stop._replace(num_behind=len(self._waiting) - 1)

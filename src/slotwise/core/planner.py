"""Who runs in the next step, with how many tokens: running rows first, in the order they joined, then those who wait.

    running rows     a token each, or a piece of a prompt; blocks for them, if need be from those last in line
    those who wait   while the discipline's gate is open and there are slots, tokens and blocks
"""

from __future__ import annotations

from slotwise.core.draft import Draft
from slotwise.core.kv import Seat
from slotwise.core.limits import ERROR, SchedulerLimits
from slotwise.core.plan import Join, Stop
from slotwise.core.reasons import ENDING, NO_BLOCKS, NO_SLOT, PROMPTS_ALONE, TOKEN_BUDGET
from slotwise.core.request import Request, State
from slotwise.core.roster import Roster
from slotwise.core.seams import Discipline, Gate, View

MAX_LOOK = 8  # who wait behind one that waits for blocks, and may be examined in a step


class Planner:
    """Fills a draft from a roster.  Limits and discipline may be changed between two plans."""

    def __init__(self, roster: Roster, limits: SchedulerLimits, discipline: Discipline) -> None:
        self.limits = limits
        self.discipline = discipline
        self._roster = roster
        self._last_victim = ""

    def draft(self, step: int, now: float) -> Draft:
        """Step number `step`, made at `now` seconds."""
        self._expire(now)
        draft = Draft(step, now, self.discipline.budget(self.limits))
        if not self.discipline.prompts_alone:
            self._plan_running(draft)
            self._plan_waiting(draft)
        elif not self._plan_prompts(draft):
            self._plan_running(draft)
        if draft.joins:
            draft.padding = self.discipline.padding(draft.counts)
        return draft

    def _expire(self, now: float) -> None:
        """End those who waited longer than they were to, before they cost a forward pass."""
        for request in self._roster.waiting.expired(now):
            waited = f"no slot came free in {now - request.arrived_at:.1f} s, and it was to wait no longer"
            self._roster.end(request, "timeout", now, waited)

    # -- those who run -------------------------------------------------------------------------------------------

    def _plan_running(self, draft: Draft) -> None:
        """Every running row gets at least a token, so a long prompt never stalls those behind it.

        Only when the budget was lowered below the number who run do the last of them wait until others have ended.
        """
        block_size = self.limits.block_size
        running = tuple(self._roster.running.values())
        behind = len(running)
        for request in running:
            behind -= 1
            if draft.preempted and request.state is not State.RUNNING:
                continue  # preempted a moment ago, for one before it
            start = request.num_scheduled
            known = len(request.tokens) + request.pending
            if request.reason or known >= request.end:
                self._plan_ended(request, draft)
                continue
            if draft.budget < 1:
                draft.refuse(request, TOKEN_BUDGET)
                continue
            count = known - start
            if count > 1:
                count = self.discipline.chunk(count, draft.budget - behind)
            target = start + count
            if target > len(request.blocks) * block_size and not self._extend(request, target, draft):
                continue
            draft.row(request, start, count, known)

    def _plan_ended(self, request: Request, draft: Draft) -> None:
        """Its last token is known or in flight."""
        if request.reason or self.discipline.leaves_together:
            draft.hold(request)
        else:
            draft.refuse(request, ENDING)

    def _extend(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Find blocks for a running row, taking them from those last in line; False when it had to yield itself."""
        while (blocks := self._roster.kv.extend(request, num_tokens)) is None:
            victim = self._victim(draft)
            draft.preempt(victim)
            if self.limits.on_pressure == ERROR:
                message = "the cache is full, and this server ends whoever must yield; try again later"
                self._roster.end(victim, "error", draft.now, message)
            else:
                self._roster.yield_place(victim, draft.step, draft.now)
            if victim is request:
                return False
        draft.grant(request, blocks)
        return True

    def _victim(self, draft: Draft) -> Request:
        """Of those last in line the one with the least to compute again, and nobody twice while others can yield."""
        key = self._roster.policy.victim_key
        candidates = [r for r in self._roster.running.values() if not r.reason and not draft.has(r)]
        candidates.sort(key=lambda r: (key(r, draft.now), r.arrival))
        last = candidates[len(candidates) // 2 :]
        victim = min(last, key=lambda r: (r.request_id == self._last_victim, r.num_computed, -r.arrival))
        self._last_victim = victim.request_id
        return victim

    # -- those who wait ------------------------------------------------------------------------------------------

    def _plan_prompts(self, draft: Draft) -> bool:
        """A step of newcomers alone; False when nobody can join."""
        running = tuple(self._roster.running.values())
        self._plan_waiting(draft)
        if draft.joins:
            for request in running:
                draft.refuse(request, PROMPTS_ALONE)
        return bool(draft.joins)

    def _plan_waiting(self, draft: Draft) -> None:
        """Admit from the head of the queue.  One that waits for blocks may be passed by a few who need fewer."""
        waiting = self._roster.waiting
        if not waiting:
            return
        gate = self._gate(draft.now)
        blocked: list[tuple[Request, str]] = []
        for request in waiting.head(max(0, gate.max_new) + 1 + MAX_LOOK):
            if not all(self._may_be_passed(before) for before, _ in blocked):
                break
            seat = None
            reason = self._why_not(draft) if len(draft.joins) < gate.max_new else gate.reason
            if not reason:
                seat = self._seat(request, draft)
                reason = "" if seat else NO_BLOCKS
            if seat:
                self._admit(request, seat, draft)
                for passed, _ in blocked:
                    passed.num_passed += 1
                continue
            draft.refuse(request, reason)
            blocked.append((request, reason))
            if reason != NO_BLOCKS or draft.preempted or len(blocked) > MAX_LOOK:
                break
        if blocked:
            first, reason = blocked[0]
            draft.stop = Stop(
                reason, first.request_id, len(waiting) - 1, min(gate.reopens_at, waiting.next_deadline))

    def _gate(self, now: float) -> Gate:
        roster = self._roster
        oldest = next(iter(roster.living.values())).arrived_at
        return self.discipline.gate(
            View(len(roster.running), len(roster.waiting), self.limits.max_num_seqs, oldest), now)

    def _why_not(self, draft: Draft) -> str:
        if not self._roster.slots.num_free:
            return NO_SLOT
        return TOKEN_BUDGET if draft.budget < 1 else ""

    def _seat(self, request: Request, draft: Draft) -> Seat | None:
        """Room for one who waits; who just yielded must not come straight back, nor anyone in its place."""
        if draft.preempted:
            return None
        reserved = self.discipline.reserve(request)
        grows = reserved < request.end - 1  # else all are given what they can ever need, and nothing need be spared
        spare = self.limits.watermark_blocks if self._roster.running and grows else 0
        return self._roster.kv.find(request, reserved, spare)

    def _may_be_passed(self, request: Request) -> bool:
        most = 0 if self.discipline.in_strict_order else self.limits.max_passes
        return request.state is State.WAITING and request.num_passed < most

    def _admit(self, request: Request, seat: Seat, draft: Draft) -> None:
        self._roster.admit(request, seat, draft.step, draft.now)
        draft.joins.append(Join(
            request.request_id, request.slot, tuple(request.tokens), request.num_prompt, request.params, request.seed,
            tuple(sorted(request.stop_ids))))
        draft.grant(request, tuple(request.blocks))
        start, known = request.num_scheduled, len(request.tokens)
        draft.row(request, start, self.discipline.chunk(known - start, draft.budget), known)

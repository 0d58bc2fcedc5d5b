"""Who runs in the next step, with how many tokens: running rows first, then those who wait (see `core/admission.py`).

    running rows     a token each, or a piece of a prompt; blocks for them, if need be from those last in line;
    those who wait   while the discipline's gate is open and there are slots, tokens, time and blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import length_hint

from slotwise.core.admission import Admission
from slotwise.core.courtesy import Courtesy, goes_before
from slotwise.core.draft import Draft
from slotwise.core.limits import ERROR, SchedulerLimits
from slotwise.core.pace import Stall, StepTime, stall
from slotwise.core.pieces import Pieces
from slotwise.core.reasons import ENDING, NO_BLOCKS, PROMPTS_ALONE, TIME_BUDGET
from slotwise.core.request import Request, State
from slotwise.core.roster import Roster
from slotwise.core.seams import Discipline
from slotwise.core.steptime import StepTimes

AIM = 0.9  # of the time a step may take: predictions are of the middle, and half of the steps take longer


class Planner:
    """Fills a draft from a roster.  Limits and discipline may be changed between two plans."""

    def __init__(self, roster: Roster, limits: SchedulerLimits, discipline: Discipline, times: StepTimes) -> None:
        self._roster = roster
        self._times = times
        self._last_victim = ""
        self._courtesy = Courtesy(roster)
        self.obey(limits, discipline)

    def obey(self, limits: SchedulerLimits, discipline: Discipline) -> None:
        """From the next draft on."""
        self.limits = limits
        self.discipline = discipline
        self._pieces = Pieces(self._roster, discipline)
        self._admission = Admission(self._roster, limits, discipline, self._pieces)
        cuts_prompts = discipline.chunk(2, 1) == 1
        self._stall = limits.max_stall_ms / 1000 if limits.max_stall_ms is not None and cuts_prompts else None

    @property
    def is_priced(self) -> bool:
        """Somebody asks what a step will take."""
        return (self.limits.max_step_ms is not None or self._stall is not None or self._roster.num_paced > 0
                or self._roster.policy.needs_prices)

    def draft(self, step: int, now: float) -> Draft:
        """Step number `step`, made at `now` seconds."""
        self._expire(now)
        draft = Draft(step, now, self.discipline.budget(self.limits), self._step_time())
        if self._roster.policy.may_preempt:
            self._admission.make_room(draft)
        if not self.discipline.prompts_alone:
            if self._roster.policy.holds_back and not self.discipline.leaves_together:
                self._plan_courteously(draft)
            else:
                self._plan_running(draft)
                self._plan_waiting(draft)
        elif not self._plan_prompts(draft):
            self._plan_running(draft)
        if draft.joins:
            draft.padding = self.discipline.padding(draft.counts)
        return draft

    def _plan_courteously(self, draft: Draft) -> None:
        """Those who are to rest come last: if the step computes nobody for whom they would, they do not."""
        self._courtesy.ask(draft, self._admission.next_in_line(draft))
        self._plan_running(draft)
        self._plan_waiting(draft)
        self._plan_late([one for one in draft.put_off if one in draft.beginning], draft)
        self._plan_late(self._courtesy.settle(draft), draft)
        self._plan_late([one for one in draft.put_off if one not in draft.beginning], draft)
        self._courtesy.count(draft)

    def _plan_waiting(self, draft: Draft) -> None:
        """Admit from the head of the queue; a prompt that was put off goes on before the requests it goes before."""
        if not self._roster.waiting:
            return
        admission_pass = self._admission.start(draft)
        while (request := admission_pass.next()) is not None:
            if draft.put_off:
                self._catch_up(draft, request)
            admission_pass.examine(request)
        admission_pass.close()

    def _catch_up(self, draft: Draft, request: Request) -> None:
        """Go on with the prompts that were put off and go before `request`, which waits; a token is kept for each of
        those who rest, should nobody begin.
        """
        ahead = [one for one in draft.put_off if goes_before(self._roster.policy, one, request, draft.now)]
        if ahead:
            draft.put_off = draft.put_off[len(ahead):]
            draft.budget -= len(draft.rest)
            self._plan_late(ahead, draft)
            draft.budget += len(draft.rest)

    def _plan_late(self, running: Sequence[Request], draft: Draft) -> None:
        """Behind some who waited.  Who runs is told of first all the same."""
        refused, draft.refused = draft.refused, []
        self._plan_rows(running, draft)
        draft.refused += refused

    def _expire(self, now: float) -> None:
        """End those who waited longer than they were to, before they cost a forward pass."""
        policy = self._roster.policy
        for request in list(self._roster.waiting.due(now)):
            if request.state is State.WAITING and request.deadline <= now:
                waited = f"no slot came free in {now - request.arrived_at:.1f} s, and it was to wait no longer"
                self._roster.end(request, "timeout", now, waited)
            elif why := policy.overdue(request, now):
                self._roster.end(request, "shed", now, why)
            else:
                self._roster.look_again(request, now)

    def _step_time(self) -> StepTime | None:
        """The time a step may take: what is asked for, the closest pace that was promised to one who runs, or what
        those who decode may be held up.
        """
        running = self._roster.running.values()
        bounds = [] if self.limits.max_step_ms is None else [self.limits.max_step_ms / 1000]
        if self._roster.num_paced:
            bounds += [request.terms.tpot for request in running if request.terms.tpot is not None]
        held_up = self._held_up(self._stall) if self._stall is not None else None
        if held_up is None and not bounds:
            return None
        return StepTime(self._times, min(bounds, default=inf) * AIM, held_up)

    def _held_up(self, bound: float) -> Stall | None:
        """What a step may take in which a prompt can be computed beside those who decode; None: there is none."""
        roster = self._roster
        num_running = len(roster.running)
        joining = min(len(roster.waiting), max(0, self.limits.max_num_seqs - num_running))
        contexts = [request.num_scheduled for request in roster.running.values() if request.unscheduled <= 1]
        newcomers = joining + num_running - len(contexts)
        if not contexts or not newcomers:
            return None
        return Stall(*(AIM * limit for limit in stall(self._times, bound, contexts, newcomers)))

    def _plan_prompts(self, draft: Draft) -> bool:
        """A step of newcomers alone; False when nobody can join."""
        running = tuple(self._roster.running.values())
        self._plan_waiting(draft)
        if draft.joins:
            for request in running:
                draft.refuse(request, PROMPTS_ALONE)
        return bool(draft.joins)

    # -- those who run -------------------------------------------------------------------------------------------

    def _plan_running(self, draft: Draft) -> None:
        """Every running row gets at least a token, so a long prompt never stalls those behind it.

        Only when the budget was lowered below the number who run do the last of them wait until others have ended, and
        only under a budget in time do rows wait for their turn.
        """
        running = self._in_order(tuple(self._roster.running.values()), draft.now)
        if draft.rest or draft.put_off:
            left_out = draft.rest.union(one.request_id for one in draft.put_off)
            running = [request for request in running if request.request_id not in left_out]
        self._plan_rows(running, draft)

    def _plan_rows(self, running: Sequence[Request], draft: Draft) -> None:
        if draft.time is not None:
            self._count_decoding(running, draft.time)
        left = iter(running)
        for request in left:
            if draft.preempted and request.state is not State.RUNNING:
                continue  # preempted a moment ago, for one before it
            known = request.num_known
            count = known - request.num_scheduled
            if request.reason or known >= request.end:
                self._plan_ended(request, draft)
                continue
            if draft.budget < 1:
                draft.refuse(request, draft.shortage)
                continue
            start = known - count
            if count > 1 and not (count := self._pieces.of(request, count, draft, length_hint(left))):
                draft.refuse(request, TIME_BUDGET)
                continue
            if start + count > request.room and not self._extend(request, start + count, draft):
                continue
            draft.row(request, start, count)

    def _in_order(self, running: Sequence[Request], now: float) -> Sequence[Request]:
        policy = self._roster.policy
        if not policy.orders_running:
            return running
        return sorted(running, key=lambda request: (policy.running_key(request, now), request.arrival))

    @staticmethod
    def _count_decoding(running: Sequence[Request], time: StepTime) -> None:
        """The rows that decode take their part of the step's time before any prompt does."""
        time.take_rows([request.num_scheduled for request in running
                        if request.unscheduled == 1 and request.num_known < request.end and not request.reason])

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
            draft.preempt(victim, NO_BLOCKS)
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
        ranked = [(key(r, draft.now), r.arrival, r)
                  for r in self._roster.running.values() if not r.reason and not draft.has(r)]
        ranked.sort(key=lambda entry: entry[:2])
        lowest = ranked[-1][0][0]
        last = [request for rank, _, request in ranked[len(ranked) // 2 :] if rank[0] == lowest]
        victim = min(last, key=lambda r: (r.request_id == self._last_victim, r.num_computed, -r.arrival))
        self._last_victim = victim.request_id
        return victim

"""Schedules one step: running requests first, then waiting ones (`core/admission.py`).

    running    one token each, or a prefill chunk (`core/chunking.py`); if blocks run out, the last are preempted
    waiting    admitted while the discipline's gate is open and slots, token budget, step time and blocks suffice
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import length_hint

from slotwise.core.admission import Admission
from slotwise.core.chunking import Chunking
from slotwise.core.interfaces import Discipline
from slotwise.core.limits import ERROR, SchedulerLimits
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.prefill_isolation import PrefillIsolation, goes_before
from slotwise.core.reasons import ENDING, NO_BLOCKS, PROMPTS_ALONE, TIME_BUDGET
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step_budget import StallLimit, StepBudget, stall_limit
from slotwise.core.step_time import StepTimeModel

AIM = 0.9  # of a step's time limit: predictions are medians, and half of the steps take longer


class Planner:
    """Fills a PlanBuilder from the RequestTable.  Limits and discipline may change between two plans."""

    def __init__(
        self, table: RequestTable, limits: SchedulerLimits, discipline: Discipline, times: StepTimeModel,
    ) -> None:
        self._table = table
        self._times = times
        self._last_victim = ""
        self._isolation = PrefillIsolation(table)
        self.configure(limits, discipline)

    def configure(self, limits: SchedulerLimits, discipline: Discipline) -> None:
        """Replace limits and discipline from the next plan on."""
        self.limits = limits
        self.discipline = discipline
        self._chunking = Chunking(self._table, discipline)
        self._admission = Admission(self._table, limits, discipline, self._chunking)
        cuts_prompts = discipline.chunk(2, 1) == 1
        self._stall = limits.max_stall_ms / 1000 if limits.max_stall_ms is not None and cuts_prompts else None

    @property
    def needs_step_times(self) -> bool:
        """True if any policy, limit or request needs step-time predictions."""
        return (self.limits.max_step_ms is not None or self._stall is not None or self._table.num_with_tpot > 0
                or self._table.policy.needs_step_times)

    def plan(self, step: int, now: float) -> PlanBuilder:
        """Returns step number `step`, planned at `now` seconds."""
        self._expire(now)
        builder = PlanBuilder(step, now, self.discipline.budget(self.limits), self._step_time())
        if self._table.policy.may_preempt:
            self._admission.make_room(builder)
        if not self.discipline.prompts_alone:
            if self._table.policy.isolates_prefill and not self.discipline.leaves_together:
                self._plan_isolated(builder)
            else:
                self._plan_running(builder)
                self._plan_waiting(builder)
        elif not self._plan_prompts(builder):
            self._plan_running(builder)
        if builder.new_requests:
            builder.padding = self.discipline.padding(builder.counts)
        return builder

    def _plan_isolated(self, builder: PlanBuilder) -> None:
        """Plan paused rows last: they run after all if the step computes no prompt that they would pause for."""
        self._isolation.start(builder, self._admission.next_in_line(builder))
        self._plan_running(builder)
        self._plan_waiting(builder)
        self._plan_late([one for one in builder.deferred if one in builder.starting], builder)
        self._plan_late(self._isolation.settle(builder), builder)
        self._plan_late([one for one in builder.deferred if one not in builder.starting], builder)
        self._isolation.count(builder)

    def _plan_waiting(self, builder: PlanBuilder) -> None:
        """Admit from the head of the queue; a deferred prefill continues before the requests that it outranks."""
        if not self._table.waiting:
            return
        admission_pass = self._admission.start(builder)
        while (request := admission_pass.next()) is not None:
            if builder.deferred:
                self._catch_up(builder, request)
            admission_pass.examine(request)
        admission_pass.close()

    def _catch_up(self, builder: PlanBuilder, request: Request) -> None:
        """Continue deferred prefills that outrank the waiting `request`; reserve a token for each paused row."""
        ahead = [one for one in builder.deferred if goes_before(self._table.policy, one, request, builder.now)]
        if ahead:
            builder.deferred = builder.deferred[len(ahead):]
            builder.budget -= len(builder.paused)
            self._plan_late(ahead, builder)
            builder.budget += len(builder.paused)

    def _plan_late(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        """Plan running rows after admissions; in `refused` they are still listed before waiting requests."""
        refused, builder.refused = builder.refused, []
        self._plan_rows(running, builder)
        builder.refused += refused

    def _expire(self, now: float) -> None:
        """Finish waiting requests past their deadline or shed by the policy; requeue the others that are due."""
        policy = self._table.policy
        for request in list(self._table.waiting.due(now)):
            if request.state is State.WAITING and request.deadline <= now:
                waited = f"no slot came free in {now - request.arrived_at:.1f} s, and it was to wait no longer"
                self._table.end(request, "timeout", now, waited)
            elif why := policy.overdue(request, now):
                self._table.end(request, "shed", now, why)
            else:
                self._table.requeue(request, now)

    def _step_time(self) -> StepBudget | None:
        """Returns the time budget by `max_step_ms`, TPOT objectives of running requests and stall limit; or None."""
        running = self._table.running.values()
        bounds = [] if self.limits.max_step_ms is None else [self.limits.max_step_ms / 1000]
        if self._table.num_with_tpot:
            bounds += [request.slo.tpot for request in running if request.slo.tpot is not None]
        held_up = self._held_up(self._stall) if self._stall is not None else None
        if held_up is None and not bounds:
            return None
        return StepBudget(self._times, min(bounds, default=inf) * AIM, held_up)

    def _held_up(self, bound: float) -> StallLimit | None:
        """Returns the stall limit of a step that mixes prefill and decode; None if this step cannot."""
        table = self._table
        num_running = len(table.running)
        joining = min(len(table.waiting), max(0, self.limits.max_num_seqs - num_running))
        contexts = [request.num_scheduled for request in table.running.values() if request.unscheduled <= 1]
        newcomers = joining + num_running - len(contexts)
        if not contexts or not newcomers:
            return None
        return StallLimit(*(AIM * limit for limit in stall_limit(self._times, bound, contexts, newcomers)))

    def _plan_prompts(self, builder: PlanBuilder) -> bool:
        """Plan a step of new prompts only; False if no request can be admitted."""
        running = tuple(self._table.running.values())
        self._plan_waiting(builder)
        if builder.new_requests:
            for request in running:
                builder.refuse(request, PROMPTS_ALONE)
        return bool(builder.new_requests)

    # -- running requests ----------------------------------------------------------------------------------------

    def _plan_running(self, builder: PlanBuilder) -> None:
        """Give every running row at least one token, so that a long prompt never stalls the rows after it.

        Rows are left out only if the token budget was lowered below the number of running rows (the last ones wait), or
        if a time budget leaves no time for another prefill chunk.
        """
        running = self._in_order(tuple(self._table.running.values()), builder.now)
        if builder.paused or builder.deferred:
            left_out = builder.paused.union(one.request_id for one in builder.deferred)
            running = [request for request in running if request.request_id not in left_out]
        self._plan_rows(running, builder)

    def _plan_rows(self, running: Sequence[Request], builder: PlanBuilder) -> None:
        if builder.time is not None:
            self._count_decoding(running, builder.time)
        left = iter(running)
        for request in left:
            if builder.preempted and request.state is not State.RUNNING:
                continue  # preempted in this plan, for a row before it
            known = request.num_known
            count = known - request.num_scheduled
            if request.reason or known >= request.end:
                self._plan_ended(request, builder)
                continue
            if builder.budget < 1:
                builder.refuse(request, builder.shortage)
                continue
            start = known - count
            if count > 1 and not (count := self._chunking.of(request, count, builder, length_hint(left))):
                builder.refuse(request, TIME_BUDGET)
                continue
            if start + count > request.capacity and not self._extend(request, start + count, builder):
                continue
            builder.add_row(request, start, count)

    def _in_order(self, running: Sequence[Request], now: float) -> Sequence[Request]:
        policy = self._table.policy
        if not policy.orders_running:
            return running
        return sorted(running, key=lambda request: (policy.running_key(request, now), request.arrival))

    @staticmethod
    def _count_decoding(running: Sequence[Request], time: StepBudget) -> None:
        """Charge all decoding rows to the time budget before any prefill chunk."""
        time.add_decodes([request.num_scheduled for request in running
                          if request.unscheduled == 1 and request.num_known < request.end and not request.reason])

    def _plan_ended(self, request: Request, builder: PlanBuilder) -> None:
        """Plan a request whose last token is known or in flight: held with its batch, or left out."""
        if request.reason or self.discipline.leaves_together:
            builder.hold(request)
        else:
            builder.refuse(request, ENDING)

    def _extend(self, request: Request, num_tokens: int, builder: PlanBuilder) -> bool:
        """Allocate the blocks a running row needs, preempting victims; False if the row itself was preempted."""
        while (blocks := self._table.kv.extend(request, num_tokens)) is None:
            victim = self._victim(builder)
            builder.preempt(victim, NO_BLOCKS)
            if self.limits.on_pressure == ERROR:
                message = "the cache is full, and this server ends requests instead of preempting them; try again later"
                self._table.end(victim, "error", builder.now, message)
            else:
                self._table.preempt(victim, builder.step, builder.now)
            if victim is request:
                return False
        builder.add_blocks(request, blocks)
        return True

    def _victim(self, builder: PlanBuilder) -> Request:
        """Choose the victim: of the last rank (at most half of all rows) the one with the fewest computed tokens.

        Never the same victim twice in a row if another exists.
        """
        key = self._table.policy.victim_key
        ranked = [(key(r, builder.now), r.arrival, r)
                  for r in self._table.running.values() if not r.reason and not builder.has(r)]
        ranked.sort(key=lambda entry: entry[:2])
        lowest = ranked[-1][0][0]
        last = [request for rank, _, request in ranked[len(ranked) // 2 :] if rank[0] == lowest]
        victim = min(last, key=lambda r: (r.request_id == self._last_victim, r.num_computed, -r.arrival))
        self._last_victim = victim.request_id
        return victim

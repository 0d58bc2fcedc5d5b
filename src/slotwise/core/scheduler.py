"""The scheduler: which requests run in the next step, with how many tokens and which cache blocks.

    schedule(now)                returns a StepPlan: running requests first, then waiting ones
    ... the executor runs it ...
    commit(plan, result, now)    appends tokens, finishes requests, frees blocks, records events

A step is scheduled in this order:

 1. Waiting requests past their deadline end; requests whose rank changes with the clock are requeued.  Requests whose
    prompts another engine computes get blocks for them (`core/kv_transfers.py`).
 2. Where the policy allows it, waiting requests preempt running ones (`core/preemption.py`).
 3. A running row gets one token, or a prefill chunk (`core/running_rows.py`).  If blocks run out, `Preemption.victim`
    chooses among the rows not yet planned: of those that the policy ranks last (at most half of them) the one with the
    fewest computed tokens.  A running request without a token is in `refused`, with a reason: its last token is in
    flight (ENDING), its drafts are (VERIFYING), it is in another step (MICRO_BATCH), a budget is spent (TOKEN_BUDGET,
    SHORT_STEP, TIME_BUDGET), it pauses for a prompt (FIRST_TOKEN), or the discipline starts prompts alone
    (PROMPTS_ALONE).
 4. Waiting requests are admitted from the head of the queue (`core/waiting_requests.py`) while `core/admission.py`
    finds no reason against it.

Under a policy that isolates prefill, rows pause in step 3 for the prompts of 4; `core/prefill_isolation.py` explains
*starting*, *paused* and *deferred*.

PlanBuilder keeps the step's account: each row that is added lowers its token budget and sets `num_logits` and `kinds`.
A prefix hit always ends before the last known token, which is computed for its logits.  A freed block may be reused by
the very next plan, although a step in flight still reads it, because executors run plans in order.

A step may be in flight, or one fewer than there are stages (`core/micro_batches.py`): schedule() works from *scheduled*
token counts, commit() advances *computed* ones.  If a request finishes after its next row was planned, that row's
tokens are dropped.  A preemption sets scheduled and computed counts to 0 (`RequestTable.preempt`) and keeps the pending
token of a row in flight; until that token is committed, and so never in the same plan, the request is not admitted
again.

A decoding row may carry drafts, which are planned last (`core/drafting.py`).  Such a row yields 1 to 1 + drafts tokens.
The commit tells how many, so the row is in no other step before it; `core/commits.py` appends them, and frees the
blocks behind the computed ones.  A held row has no drafts: where a batch leaves together, a request that ends early is
held longer.

The scheduler is deterministic: time is an argument, ties fall to the arrival number, and no code here reads a clock,
draws a random number or iterates a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from slotwise.core.admission import Admission
from slotwise.core.chunking import Chunking
from slotwise.core.commits import Commits
from slotwise.core.decode_run import Changes, DecodeRun, Outputs, is_decoding
from slotwise.core.drafting import Drafting
from slotwise.core.events import Event, Finished, Rejected
from slotwise.core.interfaces import Discipline, Policy, Proposer
from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan_builder import InFlight, PlanBuilder
from slotwise.core.preemption import Preemption
from slotwise.core.prefill_isolation import PrefillIsolation
from slotwise.core.reasons import (
    PROMPTS_ALONE,
)
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.running_rows import RunningRows
from slotwise.core.step import StepPlan, StepResult
from slotwise.core.step_time import StepTimeModel
from slotwise.core.waiting_requests import WaitingRequests


class Scheduler:
    """Owns the state of every request, through its RequestTable."""

    def __init__(
        self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, times: StepTimeModel | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """
        Args:
            times: predicts step times; commit() trains it while any policy, limit or request needs predictions.
            proposer: drafts tokens for decoding rows; None: no row has drafts.
        """
        self.times = times or StepTimeModel()
        self._table = RequestTable(limits, policy)
        self._drafting = Drafting(self._table, self.times, proposer)
        self._isolation = PrefillIsolation(self._table)
        self._commits = Commits(self._table, self._drafting, self.times)
        self._preemption = Preemption(self._table, self._commits)
        self.transfers = KVTransfers(self._table)
        self._in_flight: deque[InFlight] = deque()  # planned and not yet committed, oldest first
        self._steps = 0
        self._set_limits(limits, discipline)

    def _set_limits(self, limits: SchedulerLimits, discipline: Discipline) -> None:
        self.limits = limits
        self._discipline = discipline
        self._chunking = Chunking(self._table, limits, discipline, self.times)
        self._admission = Admission(self._table, limits, discipline)
        self._running = RunningRows(
            self._table, limits, discipline, self._chunking, self._drafting, self._preemption)
        self._waiting = WaitingRequests(self._table, discipline, self._admission, self._chunking, self._running)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self._table.policy

    @property
    def num_running(self) -> int:
        return len(self._table.running)

    @property
    def num_waiting(self) -> int:
        return len(self._table.waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._table.unfinished)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference; some of them may hold cached prefixes."""
        return self._table.kv.pool.num_available

    @property
    def has_work(self) -> bool:
        return bool(self._table.unfinished) or bool(self._in_flight)

    @property
    def may_fill(self) -> bool:
        """Whether a step planned now may have rows."""
        return self._running.may_fill

    def requests(self) -> tuple[Request, ...]:
        """All unfinished requests, in order of arrival."""
        return tuple(self._table.unfinished.values())

    def queue_positions(self, request_ids: Collection[str], now: float) -> dict[str, int]:
        """Queue position of each waiting request among `request_ids`: how many are to start before it, as of `now`."""
        return self._table.waiting.positions(request_ids, now)

    def pop_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._table.events = self._table.events, []
        return events

    def check(self) -> None:
        """Check the conservation of requests, slots and blocks.  Raises AssertionError naming the violation."""
        self._table.check()

    # -- commands ------------------------------------------------------------------------------------------------

    def configure(self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, now: float) -> None:
        """Replace limits, discipline and policy from the next plan on.  Running requests keep their slots.

        Raises:
            ValueError: the limits change what is fixed at the start: the cache, `max_model_len`, or more slots.
        """
        if limits.fixed != self.limits.fixed:
            raise ValueError("the cache and the longest sequence are fixed at the start")
        if limits.max_num_seqs > self._table.num_slots:
            raise ValueError(f"max_num_seqs is at most the {self._table.num_slots} slots made at the start")
        self._set_limits(limits, discipline)
        if policy is not self._table.policy:
            self._table.set_policy(policy, now)

    def add(self, request: Request, now: float) -> None:
        """Enqueue a request, or reject it if it could never run."""
        is_pooled = request.pooling is not None
        request.end = self.limits.longest(request.num_prompt, request.max_tokens) + is_pooled
        objection = self.limits.objection(request.num_prompt, request.max_tokens) or self.transfers.objection(request)
        self._table.add(request, objection, now)

    def finish(self, request_id: str, reason: str, now: float) -> None:
        """Finish a request in any state.  Does nothing if the id is unknown or already finished."""
        request = self._table.unfinished.get(request_id)
        if request is not None:
            self._commits.end(request, reason, now)

    def compiled(self, request_id: str, objection: str, now: float) -> None:
        """The grammar of a waiting request is compiled; with an objection it is not, and the request is rejected."""
        request = self._table.unfinished.get(request_id)
        if request is not None and request.is_compiling:
            request.is_compiling = False
            if objection:
                self._table.reject(request, objection, now)

    # -- scheduling a step ---------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Returns the next step; it has no rows when no request can run.

        Raises:
            RuntimeError: more steps than `limits.max_in_flight` are uncommitted.
        """
        if len(self._in_flight) > self.limits.max_in_flight:
            raise RuntimeError(f"commit a step in flight before planning {len(self._in_flight)} ahead")
        self._expire(now)
        self.transfers.expire(now)
        builder = PlanBuilder(
            self._steps, now, self._discipline.budget(self.limits), self._chunking.time_budget())
        self.transfers.land(self._admission, now)
        if self._table.policy.may_preempt and not self._discipline.leaves_together:
            self._preemption.preempt_outranked(self._admission, builder)
        if self._discipline.prompts_alone:
            if not self._schedule_prompts(builder):
                self._running.schedule(builder)
        elif self._table.policy.isolates_prefill and not self._discipline.leaves_together:
            self._schedule_isolated(builder)
        else:
            self._running.schedule(builder)
            self._waiting.schedule(builder)
        self.transfers.refuse(builder)
        self._drafting.add(builder)
        if builder.new_requests:  # in other steps all rows of a padded batch have one token
            builder.padding = self._discipline.padding(builder.counts)
        kv = self._table.kv
        step = builder.close(
            self._table.pop_released_slots(), kv.pop_freed(), kv.pop_expired(), kv.host.pop_copies())
        self._steps += 1
        self._in_flight.append(step)
        return step.plan

    def _expire(self, now: float) -> None:
        """Finish waiting requests past their deadline or shed by the policy; requeue the others that are due."""
        policy = self._table.policy
        for request in [*self._table.waiting.due(now), *self._table.incoming.due(now)]:
            if request.state is not State.PREEMPTED and request.deadline <= now:
                what = "its prompt did not arrive" if request.state is State.WAITING_FOR_KV else "no slot came free"
                waited = f"{what} in {now - request.arrived_at:.1f} s, and it was to wait no longer"
                self._commits.end(request, "timeout", now, waited)
            elif why := policy.overdue(request, now):
                self._commits.end(request, "shed", now, why)
            else:
                self._table.requeue(request, now)

    def _schedule_prompts(self, builder: PlanBuilder) -> bool:
        """Plan a step of new prompts only; False if no request can be admitted."""
        running = tuple(self._table.running.values())
        self._waiting.schedule(builder)
        if builder.new_requests:
            for request in running:
                builder.refuse(request, PROMPTS_ALONE)
        return bool(builder.new_requests)

    def _schedule_isolated(self, builder: PlanBuilder) -> None:
        """Plan paused rows last: they run after all if the step computes no prompt that they would pause for."""
        self._isolation.start(builder, self._admission.next_in_line(builder.now))
        self._running.schedule(builder)
        self._waiting.schedule(builder)
        late = self._running.schedule_late
        late([request for request in builder.deferred if request in builder.starting], builder)
        late(self._isolation.settle(builder), builder)
        late([request for request in builder.deferred if request not in builder.starting], builder)
        self._isolation.count(builder)

    # -- decode runs ---------------------------------------------------------------------------------------------

    def decode_run(self, now: float) -> DecodeRun | None:
        """Returns the steps from `now` on in which there is nothing to decide; None: the next step is none of them."""
        table, policy = self._table, self._table.policy
        if (not table.running or table.incoming or self._in_flight or self._drafting.proposer or table.kv.is_windowed
                or table.held_outputs or self._discipline.leaves_together or policy.isolates_prefill
                or self.limits.stages > 1
                or self._discipline.budget(self.limits) < len(table.running)
                or any(isinstance(event, Finished | Rejected) for event in table.events)
                or not all(map(is_decoding, reversed(table.running.values())))):
            return None
        if not table.waiting:
            run = DecodeRun(table, self._running.in_order(now))
        elif policy.may_preempt or self._admission.gate(now).max_new > 0:
            return None
        else:
            waiting = PlanBuilder(self._steps, now, 0)
            self._waiting.schedule(waiting)
            run = DecodeRun(table, self._running.in_order(now), waiting.refused, waiting.stop)
        return run if run.length and now < run.until else None

    def commit_run(
        self, run: DecodeRun, number: int, times: Callable[[int], tuple[float, float]], outputs: Outputs, *, each: bool,
    ) -> Iterator[tuple[int, int, Changes]]:
        """Take the first `number` steps of a run; yields as `DecodeRun.commit`, with the step's number.

        Args:
            times: returns by a step's index when it was planned and when it ended, in seconds.
        """
        policy = self._table.policy
        if self._learns:
            for index in range(number):
                self.times.step(run.work(index), *times(index))
        for tokens in outputs.steps:
            policy.served(run.requests, run.counts, tokens)
        for index, changes in run.commit(number, outputs, each=each):
            for request, reason in changes.ended:
                self._commits.end(request, reason, times(index)[1])
            yield index, self._steps + index, changes
        self._steps += number

    # -- committing a step ---------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Apply the result of the oldest uncommitted step: append tokens, finish requests, record events.

        Raises:
            RuntimeError: `plan` is not that step, or `result` is not a result of it.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise RuntimeError(f"step {plan.step} is not the next to commit")
        result.check(plan)
        step = self._in_flight.popleft()
        self._commits.apply(step, result, now, together=self._discipline.leaves_together, learns=self._learns)

    @property
    def _learns(self) -> bool:
        """Whether the step-time model is needed, and so trained."""
        return self.times.learns and (self._chunking.needs_step_times or self._table.policy.needs_step_times)

    def rollback(self) -> list[str]:
        """Drop all steps in flight after a failure; their rows are planned again from the last commit.

        Returns the ids of the unfinished requests that cannot go on: those in the oldest of these steps; in any of them
        where a cache group has recurrent states, which may have advanced since that commit.
        """
        steps = list(self._in_flight)
        self._in_flight.clear()
        for step in steps:
            for request in step.requests:
                request.unschedule()
        lost = steps if self._table.kv.has_states else steps[:1]
        return list(dict.fromkeys(
            request.request_id for step in lost for request in step.requests if not request.ended))

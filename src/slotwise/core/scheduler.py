"""The scheduler: which requests run in the next step, with how many tokens and which cache blocks.

    plan(now)                    running requests first, then waiting ones; returns a StepPlan
    ... the executor runs it ...
    commit(plan, result, now)    appends tokens, finishes requests, frees blocks, records events

One step may be in flight: plan() works from *scheduled* token counts, commit() advances *computed* ones.  The result of
a row whose request finished after it was planned is dropped (a *void* row).  The scheduler is deterministic: time is an
argument, ties fall to the arrival number, and no code here reads a clock, draws a random number or iterates a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from itertools import compress

from slotwise.core.events import Committed, Event
from slotwise.core.held_outputs import Outputs
from slotwise.core.interfaces import Discipline, Policy
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan_builder import InFlight
from slotwise.core.planner import Planner
from slotwise.core.request import Request, State
from slotwise.core.request_table import RequestTable
from slotwise.core.step import StepPlan, StepResult, TokenLogprobs
from slotwise.core.step_time import StepTimeModel, work_of

MAX_IN_FLIGHT = 1  # uncommitted steps that may exist when plan() is called


class Scheduler:
    """Owns the state of every request, through its RequestTable."""

    def __init__(
        self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, times: StepTimeModel | None = None,
    ) -> None:
        """`times` predicts step times; commit() trains it while any policy, limit or request needs predictions."""
        self._table = RequestTable(limits, policy)
        self._times = times or StepTimeModel()
        self._planner = Planner(self._table, limits, discipline, self._times)
        self._in_flight: deque[InFlight] = deque()  # planned and not yet committed, oldest first
        self._steps = 0

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> SchedulerLimits:
        return self._planner.limits

    @property
    def policy(self) -> Policy:
        return self._table.policy

    @property
    def times(self) -> StepTimeModel:
        """The step-time model."""
        return self._times

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

    def requests(self) -> tuple[Request, ...]:
        """All unfinished requests, in order of arrival."""
        return tuple(self._table.unfinished.values())

    def queue_positions(self, request_ids: Collection[str], now: float) -> dict[str, int]:
        """Queue position of each waiting request among `request_ids`: how many are to start before it, as of `now`."""
        unfinished = self._table.unfinished
        left = {name for name in request_ids if name in unfinished and unfinished[name].state is not State.RUNNING}
        found: dict[str, int] = {}
        walk = self._table.waiting.walk(now)
        for before in range(len(self._table.waiting)):
            if not left or (request := walk.next()) is None:
                break
            if request.request_id in left:
                left.remove(request.request_id)
                found[request.request_id] = before
        return found

    def pop_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._table.events = self._table.events, []
        return events

    def check(self) -> None:
        """Check law 4, conservation of requests, slots and blocks.  Raises AssertionError naming the violation."""
        self._table.check()

    # -- operations ----------------------------------------------------------------------------------------------

    def configure(self, limits: SchedulerLimits, discipline: Discipline, policy: Policy, now: float) -> None:
        """Replace limits, discipline and policy from the next plan on.  Running requests keep their slots.

        Raises:
            ValueError: the limits change what is fixed at the start: the cache, `max_model_len`, or more slots.
        """
        if limits.fixed != self.limits.fixed:
            raise ValueError("the cache and the longest sequence are fixed at the start")
        if limits.max_num_seqs > self._table.slots.total:
            raise ValueError(f"max_num_seqs is at most the {self._table.slots.total} slots made at the start")
        self._planner.configure(limits, discipline)
        if policy is not self._table.policy:
            self._table.set_policy(policy, now)

    def add(self, request: Request, now: float) -> None:
        """Enqueue a request, or reject it if it could never run."""
        request.end = self.limits.longest(request.num_prompt, request.params.max_tokens)
        self._table.add(request, self.limits.objection(request.num_prompt, request.params.max_tokens), now)

    def finish(self, request_id: str, reason: str, now: float) -> None:
        """Finish a request in any state.  Does nothing if the id is unknown or already finished."""
        request = self._table.unfinished.get(request_id)
        if request is not None:
            self._table.end(request, reason, now)

    def plan(self, now: float) -> StepPlan:
        """Returns the next step; it has no rows when no request can run.

        Raises:
            RuntimeError: more than one step is uncommitted.
        """
        if len(self._in_flight) > MAX_IN_FLIGHT:
            raise RuntimeError("commit the step in flight before planning two ahead")
        builder = self._planner.plan(self._steps, now)
        planned = builder.close(self._table.slots.pop_released(), self._table.kv.host.pop_copies())
        self._steps += 1
        self._in_flight.append(planned)
        return planned.plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Apply the result of the oldest uncommitted step: append tokens, finish requests, record events.

        Raises:
            RuntimeError: `plan` is not that step, or `result` belongs to another step.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan or result.step != plan.step:
            raise RuntimeError(f"step {plan.step} is not the next to commit, or result {result.step} is not its own")
        if len(result.tokens) != plan.num_rows:
            raise RuntimeError(f"step {plan.step} has {plan.num_rows} rows, and its result {len(result.tokens)}")
        step = self._in_flight.popleft()
        ended: list[tuple[Request, str]] = []
        kept: dict[int, tuple[int, ...]] = {}  # by row: the tokens kept, where these are not all that was sampled
        overrun = 0
        for row, (request, epoch, tokens) in enumerate(zip(step.requests, step.epochs, result.tokens, strict=True)):
            if request.reason:  # finished or held since it was planned
                overrun += len(tokens)
                kept[row] = ()
                continue
            if request.epoch == epoch:
                request.num_computed += plan.counts[row]
                if request.num_computed >= request.publish_at:
                    self._table.kv.publish(request)
            some, reason = request.append(tokens) if tokens else ((), "")
            if not some or some != tokens:
                kept[row] = some
            if reason:
                ended.append((request, reason))
        if result.complete or result.failed:
            ended += step.declared(result, {request.request_id for request, _ in ended})
        if self._planner.needs_step_times:
            self._times.step(work_of(plan.starts, plan.counts, plan.padding), plan.now, now)
        self._table.policy.served(step.requests, plan.counts, result.tokens)
        outputs = self._release(_outputs_of(plan, result, kept), ended, plan)
        overrun -= sum(len(result.tokens[row]) for row in plan.held)
        self._table.events.append(Committed(
            now, plan.step, tuple(outputs.request_ids), tuple(outputs.tokens), tuple(outputs.logprobs), overrun))
        for request, reason in ended:
            self._table.end(request, reason, now)

    def _release(self, outputs: Outputs, ended: list[tuple[Request, str]], plan: StepPlan) -> Outputs:
        """Returns the outputs to publish now, and reduces `ended` to the requests that may finish now.

        Both stay as they are, except in a batch that leaves together: its outputs are held until all of it has ended.
        """
        together = self._planner.discipline.leaves_together
        if not (together or self._table.held_outputs):
            return outputs
        self._table.held_outputs.keep(outputs)
        gone = [(request, reason) for request, reason in ended if request.state is not State.RUNNING]
        for request, reason in ended:
            if request.state is State.RUNNING:
                self._table.hold(request, reason)
        held = [request for request in self._table.running.values() if request.reason]
        if together and len(held) < len(self._table.running):
            ended[:] = gone
            return self._table.held_outputs.release(request.request_id for request, _ in gone)
        present = frozenset(plan.request_ids)  # a held row that pauses here finishes in its next step
        ended[:] = gone + [(request, request.reason) for request in held if request.request_id in present]
        return self._table.held_outputs.release(plan.request_ids)

    def rollback(self) -> list[str]:
        """Drop all steps in flight after a failure; their rows are planned again from the last commit.

        Returns the ids of the unfinished requests in the oldest of these steps.
        """
        steps = list(self._in_flight)
        self._in_flight.clear()
        for step in steps:
            for request in step.requests:
                request.unschedule()
        first = steps[0].requests if steps else ()
        return [request.request_id for request in first if not request.ended]


def _outputs_of(plan: StepPlan, result: StepResult, kept: Mapping[int, tuple[int, ...]]) -> Outputs:
    """Returns the tokens each row sampled; for rows in `kept` the tokens kept, and no entry if none were."""
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = result.logprobs or ((),) * plan.num_rows
    if not kept:
        return Outputs(plan.request_ids, result.tokens, logprobs)
    tokens = list(result.tokens)
    for row, some in kept.items():
        tokens[row] = some
    return Outputs(
        list(compress(plan.request_ids, tokens)), list(compress(tokens, tokens)), list(compress(logprobs, tokens)))

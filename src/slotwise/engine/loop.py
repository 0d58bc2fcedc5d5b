"""The engine: plan, execute, commit, again and again.

    submit   events ◄─┐
      │               │
    add ─► Scheduler.plan ─► Executor ─► Scheduler.commit ─► StepRecord
                ▲                              │
                └──────────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from slotwise.core.events import Admitted, Committed, Event, Finished, Preempted, Rejected
from slotwise.core.plan import StepPlan, TokenLogprobs
from slotwise.core.request import Request
from slotwise.core.scheduler import Scheduler
from slotwise.engine.drawn import DrawnLengths
from slotwise.engine.executor import Executor
from slotwise.engine.messages import Add, Command, Finish, RowEnd, StepRecord
from slotwise.engine.scheduling import Scheduling

NO_STEP = -1  # a record of what happened between steps
NO_PROBABILITIES = "the model gave no valid probabilities for the next token"  # of a row that failed alone

Clock = Callable[[], int]
"""Monotonic nanoseconds."""


class Engine:
    """One scheduler, one executor, one clock.  Owned by one thread.

    Args:
        depth: steps that may be in flight while the next is planned, 0 or 1.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, eos_ids: tuple[int, ...] = (), *, depth: int = 0,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._eos_ids = eos_ids
        self._depth = depth
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self._drawn = DrawnLengths()
        self._configured: Scheduling | None = None  # not yet told
        self._rests_until = 0.0  # seconds; before that only a command gives `step` something to do

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def handle(self, command: Command) -> None:
        """Take in one command; what it causes shows in the next record."""
        now = self._clock() * 1e-9
        self._rests_until = 0.0
        if isinstance(command, Add):
            request = Request(
                command.request_id, command.prompt, command.params, command.seed, self._eos_ids, command.salt)
            if command.queue_timeout:
                request.deadline = now + command.queue_timeout
            self._scheduler.add(request, now)
            if command.output_tokens:
                self._drawn.expect(command.request_id, len(command.prompt) + command.output_tokens)
        elif isinstance(command, Finish):
            self._scheduler.finish(command.request_id, command.reason, now)
        else:
            self._configured = command.scheduling
            self._scheduler.configure(
                command.scheduling.limits(self._scheduler.limits), command.scheduling.discipline())

    def wait(self) -> float:
        """Seconds until `step` may have something to do, when only the clock keeps it from that; else 0."""
        return max(0.0, self._rests_until - self._clock() * 1e-9)

    def step(self) -> StepRecord:
        """Plan as far ahead as `depth` allows, then wait for the oldest step and commit it."""
        while len(self._in_flight) <= self._depth and (self._scheduler.num_living or not self._in_flight):
            started = self._clock()
            plan = self._scheduler.plan(started * 1e-9)
            self._in_flight.append((plan, started))
            self._executor.submit(plan)
        plan, started = self._in_flight.popleft()
        try:
            result = self._executor.collect()
        except Exception as error:
            return self._failed(error, started)
        ended = self._clock()
        if self._drawn:
            result = self._drawn.applied(plan, result)
        self._scheduler.commit(plan, result, ended * 1e-9)
        self._rests_until = plan.stop.reopens_at if plan.stop and not plan.slots else 0.0
        return self._record(plan, started, ended)

    def idle_record(self) -> StepRecord | None:
        """What happened since the last step, when there is nothing to run; None when nothing did."""
        events = self._scheduler.take_events()
        if not events and self._configured is None:
            return None
        now = self._clock()
        return self._stand(StepRecord(NO_STEP, now, now, ended=ends(events)))

    def _failed(self, error: Exception, started: int) -> StepRecord:
        """A step broke: forget what is in flight and end its rows; everyone else goes on from the last commit."""
        while self._in_flight:
            self._in_flight.popleft()
            try:
                self._executor.collect()
            except Exception:  # the successor of a failed step is void, whatever becomes of it
                continue
        now = self._clock()
        for request_id in self._scheduler.rollback():
            self._scheduler.finish(request_id, "error", now * 1e-9)
        ended = ends(self._scheduler.take_events(), f"{type(error).__name__}: {error}")
        return self._stand(StepRecord(NO_STEP, started, now, ended=ended))

    def _record(self, plan: StepPlan, started: int, ended: int) -> StepRecord:
        events = self._scheduler.take_events()
        tokens, logprobs = published(plan, events)
        return self._stand(StepRecord(
            plan.step, started, ended, plan.request_ids, plan.slots, plan.starts, plan.counts, plan.padding, plan.held,
            tokens, logprobs,
            tuple(join.request_id for join in plan.joins),
            tuple(event.num_cached for event in events if isinstance(event, Admitted)),
            plan.preempted, _lost(plan, events), plan.refused, plan.stop,
            ends(events)))

    def _stand(self, record: StepRecord) -> StepRecord:
        """`record`, with where the engine stands now."""
        if self._drawn:
            for end in record.ended:
                self._drawn.forget(end.request_id)
        record.configured, self._configured = self._configured, None
        record.num_running = self._scheduler.num_running
        record.num_waiting = self._scheduler.num_waiting
        record.num_free_blocks = self._scheduler.num_free_blocks
        return record


def ends(events: list[Event], error: str = NO_PROBABILITIES) -> tuple[RowEnd, ...]:
    """The requests that `events` end; those that end in error are told `error`."""
    found = []
    for event in events:
        if isinstance(event, Finished):
            message = event.message or (error if event.reason == "error" else "")
            found.append(RowEnd(event.request_id, event.reason, event.num_output, message))
        elif isinstance(event, Rejected):
            found.append(RowEnd(event.request_id, "rejected", 0, event.message))
    return tuple(found)


def _lost(plan: StepPlan, events: list[Event]) -> tuple[int, ...]:
    """Computed tokens of each who yielded in `plan`."""
    if not plan.preempted:
        return ()
    lost = {event.request_id: event.num_computed for event in events if isinstance(event, Preempted)}
    return tuple(lost.get(request_id, 0) for request_id, _ in plan.preempted)


Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


def published(plan: StepPlan, events: list[Event]) -> tuple[tuple[Tokens, ...], tuple[Logprobs, ...]]:
    """Tokens of each row of `plan` that its commit made known, and their log-probabilities, () when nobody asked.

    Void rows and unfinished prompts have none, nor do rows whose batch has not drained.
    """
    for event in events:
        if isinstance(event, Committed) and event.step == plan.step:
            if event.request_ids == plan.request_ids:  # all but a few steps
                return event.tokens, event.logprobs if any(event.logprobs) else ()
            place = {request_id: index for index, request_id in enumerate(event.request_ids)}
            rows = [place.get(request_id) for request_id in plan.request_ids]
            tokens = tuple([() if row is None else event.tokens[row] for row in rows])
            if not any(event.logprobs):
                return tokens, ()
            return tokens, tuple([() if row is None else event.logprobs[row] for row in rows])
    return (), ()

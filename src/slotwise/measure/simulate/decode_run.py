"""Decode runs: steps of the same decoding rows in which the scheduler has nothing to decide.

A simulated server takes them without a plan each, up to four times as fast.  Every row computes one token, blocks
suffice, nothing can join, and only the last step may end requests:

    step        k        k + 1    k + 2             k + n - 1
    rows        a b c    a b c    a b c    ...      a b c
    blocks               c                          a           appended, and published when they are full
    ends                                              b

`DecodeRun.commit` leaves the state that as many calls of `Scheduler.schedule` and `commit` would, to the order of the
blocks in the pool: what a step changes is changed step by step, in the order of the rows.  Only a simulator, whose
machine knows the tokens to come, can take runs: so scheduler and engine have them here, as subclasses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from slotwise.core.host_cache import Copies
from slotwise.core.plan_builder import PlanBuilder
from slotwise.core.record import Decision, NewBlocks, Outcome, RowKind, StepPlan, StepRecord, StepResult, Stop
from slotwise.core.request import Request
from slotwise.core.scheduler import Scheduler
from slotwise.core.step_time import Work
from slotwise.engine.engine import Engine
from slotwise.measure.simulate.pace import Pace

Ended = tuple[Request, str]  # and its finish reason


class RunTokens(NamedTuple):
    """The tokens that a run's rows sample: of each row, and as columns of each step, like `StepResult.tokens`."""

    rows: Sequence[Sequence[int]]
    steps: Sequence[tuple[tuple[int, ...], ...]]


class RunChanges(NamedTuple):
    """What one step of a run changes, apart from the rows' tokens."""

    released_slots: tuple[int, ...]
    new_blocks: tuple[NewBlocks, ...]
    copies: Copies
    ended: Sequence[Ended]


class DecodeRun:
    """At most `length` steps of `requests`, a row each; of the steps planned before `until`.

    Args:
        requests: running ones, in the order of a plan's rows; each is to compute its last known token.
        refused: of each step's plan.
        stop: of each step's plan.
    """

    def __init__(
        self, scheduler: Scheduler, requests: Sequence[Request], refused: Sequence[Decision] = (),
        stop: Stop | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self.request_ids = tuple([request.request_id for request in requests])
        self.slots = tuple([request.slot for request in requests])
        self.starts = tuple([request.num_scheduled for request in requests])
        self.counts, self.kinds = (1,) * len(requests), (RowKind.DECODE,) * len(requests)
        self.refused, self.stop = tuple(refused), stop
        self.until = scheduler.waiting.next_moment if scheduler.waiting else float("inf")  # seconds
        self._scheduler = scheduler
        self._context = sum(self.starts) + len(self.starts)
        self._longest = max(self.starts) + 1
        self.length = self._affordable(min(map(_left, requests)))

    def work(self, index: int) -> Work:
        """Returns the work of a step."""
        rows = len(self.starts)
        return Work(rows, rows, self._context + rows * index, 0.0, self._longest + index)

    def end_at_stops(self, rows: Sequence[Sequence[int]]) -> None:
        """Shorten the run to the first token that may end a row, given the tokens of each."""
        for request, tokens in zip(self.requests, rows, strict=True):
            if request.stop_ids:
                stops = (index for index, token in enumerate(tokens) if token in request.stop_ids)
                self.length = min(self.length, 1 + next(stops, self.length))

    def commit(self, number: int, times: Callable[[int], tuple[float, float]], outputs: RunTokens, *, each: bool,
               ) -> Iterator[tuple[int, RunChanges]]:
        """Take the first `number` steps; yields the index of each and what it changes.  The caller ends the `ended`.

        Args:
            times: returns by a step's index when it was planned and when it ended, in seconds.
            each: else only of the last.
        """
        kv, last = self._scheduler.kv, number - 1
        extended, full = self._extended(number), self._full(number)
        for request, tokens in zip(self.requests, outputs.rows, strict=True):
            request.tokens += tokens[:last]
            request.num_scheduled += number
        for index in range(number) if each else sorted({last, *extended, *full}):
            new_blocks: list[NewBlocks] = []
            planned_at, ended_at = times(index)
            kv.pool.cached.now = planned_at
            for row in extended.get(index, ()):
                new_blocks += kv.extend(
                    self.requests[row], self.starts[row] + index + 1, planned_at) or ()
            kv.pool.cached.now = ended_at
            released, copies = self._scheduler.pop_released_slots(), kv.host.pop_copies()
            for row in full.get(index, ()):
                self.requests[row].num_computed = self.starts[row] + index + 1
                kv.advance(self.requests[row])
            ended = self._last(number, outputs) if index == last else ()
            if each or index == last:
                yield index, RunChanges(released, tuple(new_blocks), copies, ended)

    def _last(self, number: int, outputs: RunTokens) -> list[Ended]:
        """Append the tokens of the last step.  Returns the requests that these end."""
        ended = []
        for request, start, tokens in zip(self.requests, self.starts, outputs.rows, strict=True):
            request.num_computed = start + number
            request.pending = 1
            _, reason = request.append((tokens[number - 1],))
            if reason:
                ended.append((request, reason))
        return ended

    def _affordable(self, length: int) -> int:
        """Returns for how many of `length` steps there are enough blocks."""
        kv = self._scheduler.kv
        available = kv.pool.num_available
        if len(self.requests) * len(self.requests[0].tables) * (length // kv.block_size + 1) <= available:
            return length
        extended = self._extended(length)
        for index in sorted(extended):
            available -= len(extended[index]) * len(self.requests[0].tables)
            if available < 0:
                return index
        return length

    def _extended(self, number: int) -> dict[int, list[int]]:
        """By step, the rows that need a block."""
        size = self._scheduler.kv.block_size
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(self.requests):
            for index in range(request.capacity - self.starts[row], number, size):
                rows[index].append(row)
        return rows

    def _full(self, number: int) -> dict[int, list[int]]:
        """By step, the rows that fill a block."""
        size = self._scheduler.kv.block_size
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(self.requests):
            for index in range(request.advance_at - self.starts[row] - 1, number, size):
                rows[index].append(row)
        return rows


def is_decoding(request: Request) -> bool:
    """Whether it computes its last known token next, which it has sampled since it joined."""
    return (len(request.tokens) - request.num_scheduled == 1 and request.num_scheduled >= request.num_at_join
            and not request.pending and not request.reason)


def _left(request: Request) -> int:
    """Returns the steps until a decoding request has its last token, if no token ends it before."""
    left = request.max_len - len(request.tokens)
    return min(left, request.spec.forced_length - request.num_output) if request.spec.forced_length else left


class RunScheduler(Scheduler):
    """A scheduler whose coming steps may be taken as a run."""

    def decode_run(self, now: float) -> DecodeRun | None:
        """Returns the steps from `now` on in which there is nothing to decide; None: the next step is none of them."""
        policy = self.policy
        if (not self.running or self.transfers.incoming or self._in_flight or self._drafting.proposer
                or self.kv.is_windowed or self._held or self._discipline.leaves_together or policy.isolates_prefill
                or self.limits.stages > 1
                or self._discipline.budget(self.limits) < len(self.running)
                or self.ended
                or not all(map(is_decoding, reversed(self.running.values())))):
            return None
        if not self.waiting:
            run = DecodeRun(self, self.rows_in_order(now))
        elif policy.may_preempt or self._gate(now).max_new > 0:
            return None
        else:
            builder = PlanBuilder(self._steps, now, 0)
            self._add_waiting(builder)
            run = DecodeRun(self, self.rows_in_order(now), builder.refused, builder.stop)
        return run if run.length and now < run.until else None

    def commit_run(
        self, run: DecodeRun, number: int, times: Callable[[int], tuple[float, float]], outputs: RunTokens, *,
        each: bool,
    ) -> Iterator[tuple[int, int, RunChanges]]:
        """Take the first `number` steps of a run; yields as `DecodeRun.commit`, with the step's number.

        Args:
            times: returns by a step's index when it was planned and when it ended, in seconds.
        """
        if self._learns_from(run.counts):
            for index in range(number):
                self.times.step(run.work(index), *times(index))
        for tokens in outputs.steps:
            self.policy.served(run.requests, run.counts, tokens)
        for index, changes in run.commit(number, times, outputs, each=each):
            for request, reason in changes.ended:
                self._finish(request, reason, times(index)[1])
            yield index, self._steps + index, changes
        self._steps += number


class RunEngine(Engine):
    """An engine whose coming steps may be taken as a run."""

    _scheduler: RunScheduler

    def decode_run(self) -> DecodeRun | None:
        """Returns the coming steps in which there is nothing to decide, from now on; None: the next is none of them."""
        if self.depth or self._grammars is not None:
            return None
        return self._scheduler.decode_run(self.clock() * 1e-9)

    def take(
        self, run: DecodeRun, number: int, times: Callable[[int], tuple[int, int]], outputs: RunTokens, *,
        each: bool = True) -> Iterator[StepRecord]:
        """Takes the first `number` steps of a run, and yields their records.

        Must be read to its end.

        Args:
            times: returns by a step's index when it was planned and when it ended, in nanoseconds.
            each: the record of every step; else only that of the last.
        """
        self._idle_until = 0.0

        def seconds(index: int) -> tuple[float, float]:
            started, ended = times(index)
            return started * 1e-9, ended * 1e-9

        for index, step, changes in self._scheduler.commit_run(run, number, seconds, outputs, each=each):
            started, ended = times(index)
            self._planned.append(started)
            tokens = outputs.steps[index]
            plan = StepPlan(
                step, started * 1e-9, changes.released_slots, (), (), changes.new_blocks, run.request_ids, run.slots,
                tuple([start + index for start in run.starts]), run.counts, (), run.counts, run.kinds, (), (), (),
                run.refused, run.stop, *changes.copies)
            yield self._record(
                started, ended, (plan,), StepResult(step, tokens), Outcome(ended=self._scheduler.pop_ended()))


class RunInProgress:
    """The steps of a run that a server has taken so far: its scheduler learns of them when the run is over.

    Args:
        rows: the tokens of each.
        adapter_seconds: that the adapters take in each step.
        at: when its first step begins, in seconds.
    """

    def __init__(self, run: DecodeRun, rows: Sequence[Sequence[int]], pace: Pace, adapter_seconds: float, at: float,
                 ) -> None:
        run.end_at_stops(rows)
        self.run = run
        self.rows = rows
        self.adapter_seconds = adapter_seconds
        self.seconds = pace.decode_steps(run.work(0), at)  # of each step to come
        self.planned: list[float] = []  # seconds, as the next
        self.ended: list[float] = []

    @property
    def left(self) -> int:
        """Steps to come."""
        return self.run.length - len(self.ended)

    def times(self, index: int) -> tuple[int, int]:
        """Returns when a step was planned, and when it ended, in nanoseconds."""
        return round(self.planned[index] * 1e9), round(self.ended[index] * 1e9)

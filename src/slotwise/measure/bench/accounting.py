"""Where a run's time went: one fold over the engine's step records, in memory bounded by the workload.

A *slot-step* is one slot during one step that computed anything; a step has as many as there are slots, however many
rows it had.  Each is one of:

    prefill   tokens of a prompt, or tokens computed again after a preemption
    decode    the last known token, to sample the next: both are useful work
    held      a finished request, computed again until its batch has drained
    empty     nothing: no request holds the slot, or the step left its request out

so that  occupancy = (prefill + decode) / (steps x slots).  Nothing runs between steps, so idle time has no slot-steps;
it shows in the seconds that requests wait.

The slot x step chart says what each slot computed at every step, run-length encoded:

    slot 0   P d d d d d d          [0, 0, 1, "prefill", 0, 6], [0, 1, 6, "decode", 0, 6]
    slot 1   P d d H H H H          [1, 0, 1, "prefill", 1, 4], [1, 1, 2, "decode", 1, 2], [1, 3, 4, "held", 1, 4]

Step time is a straight line: seconds = a + b x, with x the rows of a decode step, or the tokens of a step with prompts.
`a` is what a step costs for any number of rows (weights read once, launches, Python): what batching shares out.  `b` is
what each row adds.  At a/b rows the two are equal, and further rows no longer come nearly free.  The line is the
least-squares fit through the median of all steps with the same x, each median weighted by the number of such steps: a
step that another process delayed does not bend it.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slotwise.core.record import RequestEnd, StepRecord
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.measure.bench.measures import summary

MAX_POINTS = 400  # of a curve or a distribution
NANO = 1e-9
MAX_STEPS = 3000  # more than a screen can show; later steps are counted but not drawn
PREFILL = "prefill"  # tokens of a prompt, or tokens computed again after a preemption
DECODE = "decode"  # the last token known, to sample the next
HELD = "held"  # a request that has ended, computed again until its batch has drained


@dataclass(slots=True)
class _Progress:
    """A request in progress."""

    number: int
    num_prompt: int
    arrived_at: float  # seconds, absolute
    known: int  # tokens: prompt and sampled
    computed: int = 0  # tokens in the cache
    last_published: float = 0.0  # seconds; 0: none so far
    output: list[int] = field(default_factory=list)


class Accounts:
    """Folds arrivals and records, in the order they come; `entry()` returns the totals.

    Args:
        limits: the engine's slots, and the blocks of its cache.
        started_at: seconds on the records' clock when the run begins.
    """

    def __init__(self, limits: SchedulerLimits, started_at: float) -> None:
        self._limits = limits
        self._started_at = started_at
        self._unfinished: dict[int, _Progress] = {}
        self._lanes = SlotChartBuilder(limits.max_num_seqs)
        self._waiting = _HeadOfLine(started_at)
        self._itl, self._e2e = array("d"), array("d")  # seconds
        self._cumulative = _Curve()
        self._slot_steps = dict.fromkeys((PREFILL, DECODE, HELD), 0)
        self._steps = self._decode_steps = self._max_rows = 0
        self._output_tokens = self._padded_tokens = self._preemptions = 0
        self._drafts = self._drafts_right = 0
        self._reserved_unused = 0.0  # summed over steps
        self.ttft: dict[int, float] = {}  # seconds, by request number
        self.outputs: dict[int, list[int]] = {}  # by request number: tokens of completed requests
        self.failures: list[str] = []
        self.sampled_tokens = 0  # includes tokens that an undrained batch has not returned yet
        self.ended_at = started_at  # seconds; of the last record
        self.decode_times = StepSeconds()  # of steps without a prompt or drafts, by rows
        self.prompt_times = StepSeconds()  # of the others, by tokens

    # -- events ----------------------------------------------------------------------------------------------------

    def arrived(self, request_id: int, num_prompt: int, at: float) -> None:
        """Count a request added now, due at `at` seconds: its latencies count from there."""
        self._unfinished[request_id] = _Progress(request_id, num_prompt, at, num_prompt)
        self._waiting.arrived(at)

    def step(self, record: StepRecord) -> int:
        """Count a step.  Returns the number of requests that ended in it."""
        now = record.ended_ns * NANO
        if record.plan.slots:
            self._computed(record, now)
        self._publish(record, now)
        self._waiting.step(record, self._limits.max_num_seqs)
        self._reserved_unused += self._unused_blocks(record) if record.plan.slots else 0
        self.ended_at = now
        return len(record.ended)

    def _computed(self, record: StepRecord, now: float) -> None:
        held = frozenset(record.plan.held)
        padding = record.plan.padding or (0,) * len(record.plan.slots)
        kinds = dict.fromkeys((PREFILL, DECODE, HELD), 0)
        samples = False
        for row, (request_id, slot, start, count) in enumerate(
                zip(record.plan.request_ids, record.plan.slots, record.plan.starts, record.plan.counts, strict=True)):
            progress = self._unfinished[request_id]
            end = start + count
            kind = HELD if row in held else DECODE if progress.num_prompt <= start == progress.known - 1 else PREFILL
            drafts = record.plan.drafts[row] if record.plan.drafts else ()
            sampled = len(record.result.tokens[row]) if drafts else int(end == progress.known)
            samples = samples or kind == HELD or sampled > 0
            if kind != HELD:
                progress.computed = record.next_position(row)
                self.sampled_tokens += sampled
                progress.known += sampled
            kinds[kind] += 1
            self._lanes.row(slot, kind, progress.number, count, padding[row])
        self._lanes.end_step(now - self._started_at)
        for kind, rows in kinds.items():
            self._slot_steps[kind] += rows
        self._steps += 1
        self._decode_steps += samples
        self._max_rows = max(self._max_rows, len(record.plan.slots))
        self._padded_tokens += sum(padding)
        self._time(record, sum(record.plan.counts) + sum(padding), prompts=kinds[PREFILL])

    def _time(self, record: StepRecord, tokens: int, prompts: int) -> None:
        seconds = (record.ended_ns - record.started_ns) * NANO
        if prompts:
            self.prompt_times.add(tokens, seconds)
        elif not record.plan.drafts:
            self.decode_times.add(len(record.plan.slots), seconds)

    def _publish(self, record: StepRecord, now: float) -> None:
        before = self._output_tokens
        for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
            if tokens:
                self._deliver(self._unfinished[request_id], tokens, now)
        if self._output_tokens > before:
            self._cumulative.add(now - self._started_at, self._output_tokens)
        for drafts, tokens in zip(record.plan.drafts, record.result.tokens, strict=False):
            self._drafts += len(drafts)
            self._drafts_right += max(0, len(tokens) - 1) if drafts else 0
        for decision in record.preempted:
            self._unfinished[decision.request_id].computed = 0
            self._preemptions += 1
        for end in record.ended:
            self._end(end, now)

    def _deliver(self, progress: _Progress, tokens: Sequence[int], now: float) -> None:
        if progress.last_published:
            self._itl.append(now - progress.last_published)
        else:
            self.ttft[progress.number] = now - progress.arrived_at
        progress.last_published = now
        progress.output += tokens
        self._output_tokens += len(tokens)

    def _end(self, end: RequestEnd, now: float) -> None:
        progress = self._unfinished.pop(end.request_id)
        if end.reason in ("stop", "length"):
            self.outputs[progress.number] = progress.output
            self._e2e.append(now - progress.arrived_at)
        else:
            self.failures.append(f"request {progress.number}: {end.reason} {end.message}".rstrip())

    def _unused_blocks(self, record: StepRecord) -> int:
        """Blocks that requests hold after the step's commit, without any of their tokens."""
        limits = self._limits
        reserved = limits.num_blocks - record.counters.num_free_blocks
        filled = sum(-(-progress.computed // limits.block_size) for progress in self._unfinished.values())
        return max(0, reserved - filled)

    # -- result --------------------------------------------------------------------------------------------------------

    def entry(self) -> dict[str, Any]:
        """The measured part of a run in the result, JSON-ready; seconds, tokens, shares between 0 and 1."""
        seconds = self.ended_at - self._started_at
        steps = max(self._steps, 1)
        rows = sum(self._slot_steps.values())
        wanted = rows - self._slot_steps[HELD]
        return {
            "num_slots": self._limits.max_num_seqs, "seconds": seconds, "steps": self._steps,
            "decode_steps": self._decode_steps, "output_tokens": self._output_tokens,
            "output_throughput": self._output_tokens / seconds if seconds else 0.0,
            "request_throughput": len(self._e2e) / seconds if seconds else 0.0,
            "occupancy": wanted / (steps * self._limits.max_num_seqs), "mean_rows": rows / steps,
            "max_rows": self._max_rows, "preemptions": self._preemptions,
            "draft_tokens": self._drafts, "accepted_draft_tokens": self._drafts_right,
            "ttft": summary(self.ttft.values()), "itl": summary(self._itl), "e2e": summary(self._e2e),
            "ttft_values": thinned(sorted(self.ttft.values())), "itl_values": thinned(sorted(self._itl)),
            "waste": self._waste(rows), "chart": self._lanes.chart(), "cumulative": self._cumulative.points(),
        }

    def _waste(self, rows: int) -> dict[str, float]:
        return {
            "padded_tokens": self._padded_tokens, "held_row_steps": self._slot_steps[HELD],
            "empty_slot_steps": self._steps * self._limits.max_num_seqs - rows,
            "head_of_line_seconds": self._waiting.seconds,
            "reserved_unused": self._reserved_unused / max(self._steps, 1) / self._limits.num_blocks,
        }


class _HeadOfLine:
    """Head-of-line blocking: seconds, summed over requests, spent waiting while a slot was empty or held.

    During a step a slot is wasted if it has no row or a held one; between steps, if no request holds it or an ended one
    does.
    """

    def __init__(self, started_at: float) -> None:
        self.seconds = 0.0
        self._count = 0
        self._ended_at = started_at
        self._wasted_in_step = self._wasted_between = True

    def arrived(self, at: float) -> None:
        """Count a request that came at `at`, during the step that has just ended or after it."""
        self._count += 1
        early = self._ended_at - at
        if self._wasted_in_step if early > 0 else self._wasted_between:
            self.seconds += early  # negative after the step: the gap to the next is counted for all alike

    def step(self, record: StepRecord, num_slots: int) -> None:
        started, ended = record.started_ns * NANO, record.ended_ns * NANO
        if self._wasted_between:
            self.seconds += self._count * (started - self._ended_at)
        self._count += len(record.preempted) - len(record.admitted)
        self._wasted_in_step = len(record.plan.slots) < num_slots or bool(record.plan.held)
        if self._wasted_in_step:
            self.seconds += self._count * (ended - started)
        self._wasted_between = record.counters.num_running < num_slots or bool(record.plan.held)
        self._ended_at = ended


class _Curve:
    """Points of a growing sum, thinned by half when there are too many."""

    def __init__(self) -> None:
        self._points: list[list[float]] = [[0.0, 0]]

    def add(self, x: float, y: float) -> None:
        self._points.append([round(x, 6), y])
        if len(self._points) > 8 * MAX_POINTS:
            self._points = [*self._points[:-1:2], self._points[-1]]

    def points(self) -> list[list[float]]:
        return thinned(self._points)


def thinned(values: Sequence[Any]) -> list[Any]:
    """At most MAX_POINTS of `values`, evenly spaced, with the first and the last."""
    if len(values) <= MAX_POINTS:
        return list(values)
    step = (len(values) - 1) / (MAX_POINTS - 1)
    return [values[round(index * step)] for index in range(MAX_POINTS)]


# -- the slot x step chart ---------------------------------------------------------------------------------------------


class SlotChartBuilder:
    """Collects rows step by step; a run is `[slot, first step, steps, kind, request number, tokens]`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._step_ends = [0.0]
        self._runs: list[list[Any]] = []
        self._open: dict[int, list[Any]] = {}  # slot -> its latest run
        self._pads: list[list[int]] = []
        self._truncated = False

    def row(self, slot: int, kind: str, number: int, tokens: int, padding: int) -> None:
        """Add a row to the step that `end_step` closes."""
        if self._full:
            return
        step = len(self._step_ends) - 1
        run = self._open.get(slot)
        if run is not None and run[3] == kind and run[4] == number and run[1] + run[2] == step:
            run[2] += 1
            run[5] += tokens
        else:
            self._open[slot] = run = [slot, step, 1, kind, number, tokens]
            self._runs.append(run)
        if padding:
            self._pads.append([slot, step, padding])

    def end_step(self, at: float) -> None:
        """Close the step, which ended `at` seconds after the run began."""
        if self._full:
            self._truncated = True
        else:
            self._step_ends.append(round(at, 6))

    @property
    def _full(self) -> bool:
        return len(self._step_ends) > MAX_STEPS

    def chart(self) -> dict[str, Any]:
        return {
            "slots": self._num_slots, "steps": len(self._step_ends) - 1, "step_ends": self._step_ends,
            "runs": self._runs, "pads": self._pads, "truncated": self._truncated,
        }


# -- step time as a straight line --------------------------------------------------------------------------------------


class StepTimeLine(NamedTuple):
    """seconds = a + b x"""

    a: float
    b: float

    def total(self, steps: StepSeconds) -> float:
        """Seconds predicted for all of `steps` together."""
        return sum(len(seconds) * (self.a + self.b * x) for x, seconds in steps.by_x.items())


class StepSeconds:
    """Seconds of steps, by x: eight bytes per step."""

    def __init__(self) -> None:
        self.by_x: dict[int, array[float]] = {}

    def add(self, x: int, seconds: float) -> None:
        self.by_x.setdefault(x, array("d")).append(seconds)

    def __iter__(self) -> Iterator[float]:
        for seconds in self.by_x.values():
            yield from seconds

    @property
    def total(self) -> float:
        """Seconds, summed."""
        return sum(sum(seconds) for seconds in self.by_x.values())

    def fitted(self) -> StepTimeLine:
        """The line through the medians; flat where all steps share one x, and zero where there are none."""
        xs = list(self.by_x)
        medians = [statistics.median(seconds) for seconds in self.by_x.values()]
        counts = [len(seconds) for seconds in self.by_x.values()]
        if len(xs) < 2:
            return StepTimeLine(sum(medians), 0.0)
        b, a = np.polyfit(xs, medians, 1, w=np.sqrt(counts))
        return StepTimeLine(float(a), float(b))


def together(several: Iterable[StepSeconds]) -> StepSeconds:
    """The steps of several runs as one."""
    whole = StepSeconds()
    for steps in several:
        for x, seconds in steps.by_x.items():
            whole.by_x.setdefault(x, array("d")).extend(seconds)
    return whole

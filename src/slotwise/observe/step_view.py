"""One step of a log: its kind, its rows, the waste in it, and the requests left out with their reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slotwise.core.record import NO_STEP, RowKind, StepRecord
from slotwise.core.step_time import Work, work_of
from slotwise.observe.event_log import Entry, LogError, Run
from slotwise.observe.fold import Timelines
from slotwise.observe.request_timeline import STEP_UNDER_WAY, RequestTimeline
from slotwise.observe.step_time_store import ObservedStepTimes

DECODE, MIXED, PREFILL = KINDS = ("decode", "mixed", "prefill")


def kind(step: StepRecord) -> str:
    """`decode` or `prefill`, if all rows are; else `mixed`."""
    kinds = step.plan.kinds
    if RowKind.PREFILL not in kinds:
        return DECODE
    return MIXED if RowKind.DECODE in kinds else PREFILL


def held_tokens(step: StepRecord) -> int:
    """Returns the tokens computed for rows that already have their last token."""
    return sum([step.plan.counts[row] for row in step.plan.held]) if step.plan.held else 0


def work(step: StepRecord) -> Work:
    """Returns the work of a step, padding included."""
    return work_of(step.plan.starts, step.plan.counts, step.plan.padding, step.plan.drafts)


class Row(NamedTuple):
    """A row of the step."""

    number: int
    slot: int
    start: int
    num_tokens: int
    what: str  # prefill, recompute, decode or held
    cached: int  # tokens found in the cache, if admitted in this step; else -1


class LeftOut(NamedTuple):
    """An unfinished request that is not in the step."""

    number: int
    state: str  # waiting, running, preempted or arriving
    reason: str


class StepView(NamedTuple):
    step: StepRecord
    predicted: float  # seconds, by the step-time model
    rows: list[Row]
    left_out: list[LeftOut]


def times_of(entries: Sequence[Entry]) -> ObservedStepTimes:
    """Returns a step-time model fitted to a log."""
    times = ObservedStepTimes()
    for entry in entries:
        if isinstance(entry, Run) and entry.learned is not None and not times.is_trained:
            times = ObservedStepTimes(entry.learned)
        elif isinstance(entry, StepRecord):
            times.stepped(entry)
    return times


def step_view(entries: Sequence[Entry], number: int, times: ObservedStepTimes) -> StepView:
    """Returns step `number` of a log; of the last run that reached it, if there are several.

    Raises:
        LogError: there is no such step.
    """
    found = [at for at, entry in enumerate(entries) if isinstance(entry, StepRecord)
             and entry.step == number != NO_STEP]
    if not found:
        last = max((entry.step for entry in entries if isinstance(entry, StepRecord)), default=NO_STEP)
        raise LogError(f"there is no step {number}; the last is {last}" if last >= 0 else "there are no steps")
    step, timelines = entries[found[-1]], Timelines()
    assert isinstance(step, StepRecord)
    for entry in entries[: found[-1]]:
        timelines.apply(entry)
    unfinished = {number: one for number, one in timelines.by_number.items() if one.over_at < 0}
    timelines.plan(step)
    rows = list(_rows(step, timelines.by_number))
    proposing = step.result.proposing.seconds if step.result.proposing else 0.0  # the model predicts the rest
    return StepView(step, proposing + times.seconds(work(step)), rows, list(_left_out(step, unfinished)))


def _rows(step: StepRecord, known: Mapping[int, RequestTimeline]) -> Iterator[Row]:
    admitted = dict(step.admitted)
    for row, (number, slot, start, count) in enumerate(
            zip(step.plan.request_ids, step.plan.slots, step.plan.starts, step.plan.counts, strict=True)):
        timeline = known.get(number)
        if row in step.plan.held:
            what = "held"
        elif timeline is not None and start < timeline.reached:
            what = "recompute"
        else:
            what = "decode" if timeline is not None and start >= timeline.request.num_prompt else "prefill"
        yield Row(number, slot, start, count, what, admitted.get(number, -1))


def _left_out(step: StepRecord, unfinished: Mapping[int, RequestTimeline]) -> Iterator[LeftOut]:
    given = dict(step.plan.refused) | {number: reason for number, reason, _ in step.preempted}
    behind = step.plan.stop.reason if step.plan.stop is not None else ""
    for number, one in unfinished.items():
        if number in step.plan.request_ids or one.request.ns >= step.ended_ns:
            continue
        state = "running" if one.is_running else "preempted" if one.num_preemptions else "waiting"
        if not 0 < one.taken_ns <= step.started_ns:
            yield LeftOut(number, "arriving", STEP_UNDER_WAY)
        elif reason := given.get(number) or (behind if state != "running" else ""):
            yield LeftOut(number, state, reason)

"""One step of a log: its rows, the requests left out, and their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slotwise.observe.event_log import NO_STEP, Entry, LogError, Run, Step
from slotwise.observe.explain import STEP_UNDER_WAY
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_time import StepTimeModel, work_of


class Ran(NamedTuple):
    """A row of the step."""

    number: int
    slot: int
    start: int
    count: int
    what: str  # prefill, recompute, decode or held
    cached: int  # tokens found in the cache, if admitted in this step; else -1


class LeftOut(NamedTuple):
    """An unfinished request that is not in the step."""

    number: int
    state: str  # waiting, running or preempted
    reason: str


class StepView(NamedTuple):
    step: Step
    predicted: float  # seconds, by the step-time model
    ran: list[Ran]
    left_out: list[LeftOut]


def times_of(entries: Iterable[Entry]) -> StepTimeModel:
    """Returns a step-time model fitted to a log."""
    times = StepTimeModel()
    for entry in entries:
        if isinstance(entry, Run) and entry.learned is not None and not times.knows:
            times = StepTimeModel(entry.learned)
        elif isinstance(entry, Step):
            times.stepped(entry)
    return times


def step_view(
    entries: Sequence[Entry], timelines: dict[int, RequestTimeline], number: int, times: StepTimeModel,
) -> StepView:
    """Returns step `number` of a log; of the last run that reached it, if there are several.

    Raises:
        LogError: there is no such step.
    """
    steps = [at for at, entry in enumerate(entries) if isinstance(entry, Step) and entry.step == number != NO_STEP]
    if not steps:
        last = max((entry.step for entry in entries if isinstance(entry, Step)), default=NO_STEP)
        raise LogError(f"there is no step {number}; the last is {last}" if last >= 0 else "there are no steps")
    step = entries[steps[-1]]
    assert isinstance(step, Step)
    positions = _Positions()
    for entry in entries[: steps[-1]]:
        positions.feed(entry)
    predicted = times.seconds(work_of(step.starts, step.counts, step.padding))
    return StepView(step, predicted, list(_rows(step, timelines, positions)),
                    list(_left_out(step, timelines, positions)))


class _Positions:
    """The requests that hold slots, and the computed tokens of preempted ones."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.lost: dict[int, int] = {}
        self.ended: set[int] = set()

    def state(self, number: int) -> str:
        if number in self.running:
            return "running"
        return "preempted" if number in self.lost else "waiting"

    def feed(self, entry: Entry) -> None:
        if isinstance(entry, Run):
            self.running.clear()
        if not isinstance(entry, Step):
            return
        self.running.update(admission.number for admission in entry.admitted)
        for preemption in entry.preempted:
            self.running.discard(preemption.number)
            self.lost[preemption.number] = max(preemption.lost, self.lost.get(preemption.number, 0))
        self.ended.update(end.number for end in entry.ended)
        self.running -= self.ended


def _rows(step: Step, timelines: dict[int, RequestTimeline], positions: _Positions) -> Iterable[Ran]:
    cached = {admission.number: admission.cached for admission in step.admitted}
    for row, (number, slot, start, count) in enumerate(
            zip(step.numbers, step.slots, step.starts, step.counts, strict=True)):
        if row in step.held:
            what = "held"
        elif start < positions.lost.get(number, 0):
            what = "recompute"
        elif number in timelines and start >= timelines[number].request.num_prompt:
            what = "decode"
        else:
            what = "prefill"
        yield Ran(number, slot, start, count, what, cached.get(number, -1))


def _left_out(step: Step, timelines: dict[int, RequestTimeline], positions: _Positions) -> Iterable[LeftOut]:
    given = {decision.number: decision.reason for decision in (*step.refused, *step.preempted)}
    yielded = {preemption.number for preemption in step.preempted}
    behind = step.stop.reason if step.stop is not None else ""
    for number, one in timelines.items():
        if number in step.numbers or number in positions.ended or one.request.ns >= step.ended_ns:
            continue
        state = "preempted" if number in yielded else positions.state(number)
        if not one.taken_ns or one.taken_ns > step.started_ns:
            yield LeftOut(number, "arriving", STEP_UNDER_WAY)
        elif reason := given.get(number) or (behind if state != "running" else ""):
            yield LeftOut(number, state, reason)

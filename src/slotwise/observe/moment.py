"""One step of a log: who ran, who did not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slotwise.observe.explain import STEP_UNDER_WAY
from slotwise.observe.facts import Facts
from slotwise.observe.log import NO_STEP, Entry, LogError, Run, Step
from slotwise.observe.steptime import StepTimes, work_of


class Ran(NamedTuple):
    """A row of the step."""

    number: int
    slot: int
    start: int
    count: int
    what: str  # prefill, recompute, decode or held
    cached: int  # tokens found in the cache, if it joined in this step; -1: it was there


class LeftOut(NamedTuple):
    """Somebody alive who is not in the step."""

    number: int
    state: str  # waiting, running or preempted
    reason: str


class Moment(NamedTuple):
    step: Step
    predicted: float  # seconds, by the step-time model
    ran: list[Ran]
    left_out: list[LeftOut]


def times_of(entries: Iterable[Entry]) -> StepTimes:
    """What a log teaches about step times."""
    times = StepTimes()
    for entry in entries:
        if isinstance(entry, Run) and entry.learned is not None and not times.knows:
            times = StepTimes(entry.learned)
        elif isinstance(entry, Step):
            times.stepped(entry)
    return times


def moment(entries: Sequence[Entry], facts: dict[int, Facts], number: int, times: StepTimes) -> Moment:
    """Step `number` of a log; of its last run that came so far, if there are several.

    Raises:
        LogError: there is no such step.
    """
    steps = [at for at, entry in enumerate(entries) if isinstance(entry, Step) and entry.step == number != NO_STEP]
    if not steps:
        last = max((entry.step for entry in entries if isinstance(entry, Step)), default=NO_STEP)
        raise LogError(f"there is no step {number}; the last is {last}" if last >= 0 else "there are no steps")
    step = entries[steps[-1]]
    assert isinstance(step, Step)
    stands = _Stands()
    for entry in entries[: steps[-1]]:
        stands.follow(entry)
    predicted = times.seconds(work_of(step.starts, step.counts, step.padding))
    return Moment(step, predicted, list(_rows(step, facts, stands)), list(_left_out(step, facts, stands)))


class _Stands:
    """Who holds a slot, and what was computed of those who gave theirs up."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.lost: dict[int, int] = {}
        self.ended: set[int] = set()

    def state(self, number: int) -> str:
        if number in self.running:
            return "running"
        return "preempted" if number in self.lost else "waiting"

    def follow(self, entry: Entry) -> None:
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


def _rows(step: Step, facts: dict[int, Facts], stands: _Stands) -> Iterable[Ran]:
    cached = {admission.number: admission.cached for admission in step.admitted}
    for row, (number, slot, start, count) in enumerate(
            zip(step.numbers, step.slots, step.starts, step.counts, strict=True)):
        if row in step.held:
            what = "held"
        elif start < stands.lost.get(number, 0):
            what = "recompute"
        elif number in facts and start >= facts[number].request.num_prompt:
            what = "decode"
        else:
            what = "prefill"
        yield Ran(number, slot, start, count, what, cached.get(number, -1))


def _left_out(step: Step, facts: dict[int, Facts], stands: _Stands) -> Iterable[LeftOut]:
    given = {decision.number: decision.reason for decision in (*step.refused, *step.preempted)}
    yielded = {preemption.number for preemption in step.preempted}
    behind = step.stop.reason if step.stop is not None else ""
    for number, one in facts.items():
        if number in step.numbers or number in stands.ended or one.request.ns >= step.ended_ns:
            continue
        state = "preempted" if number in yielded else stands.state(number)
        if not one.taken_ns or one.taken_ns > step.started_ns:
            yield LeftOut(number, "arriving", STEP_UNDER_WAY)
        elif reason := given.get(number) or (behind if state != "running" else ""):
            yield LeftOut(number, state, reason)

"""The fold of a log: against what a plain pass over the same log says, and by hand."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from support.recorded import Recorded
from support.records import record_of
from support.toy_engine import MS, Rehearsal, engine

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import Admission, Decision, Preemption, RequestEnd, StepRecord, Stop
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.messages import Add, Timing
from slotwise.observe import traces
from slotwise.observe.event_log import FORMAT, CommandEntry, Entry, RequestEntry, Run, Sent
from slotwise.observe.fold import Changes, Timelines, gather
from slotwise.observe.recorder import Recorder
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.traces import Completion


def request(number: int, at_ms: float, **timing: int) -> RequestEntry:
    add = Add(number, RequestSpec((), SamplingSpec()), Timing(**timing), f"cmpl-{number}-0")
    return RequestEntry(round(at_ms * MS), 4, add)



def step(at_ms: int, numbers: tuple[int, ...] = (), **columns: object) -> StepRecord:
    """Ten milliseconds; a token for each row."""
    return record_of(at_ms // 10, at_ms * MS, (at_ms + 10) * MS, numbers=numbers, slots=numbers,
                     starts=(4,) * len(numbers),
                counts=(1,) * len(numbers), **columns)


class Told:
    """The timelines that are complete."""

    def __init__(self) -> None:
        self.timelines: list[RequestTimeline] = []
        self._completion = Completion()

    def write(self, entry: Entry, changes: Changes) -> None:
        self.timelines += self._completion.feed(entry, changes)


def told(entries: list[Entry]) -> list[RequestTimeline]:
    found, fold = Told(), Timelines()
    for entry in [step(0), *entries]:
        found.write(entry, fold.apply(entry))
    return found.timelines


def stages(timeline: RequestTimeline) -> list[tuple[str, float, float]]:
    return [(stage.name, stage.start_ns / MS, stage.end_ns / MS) for stage in timeline.closed_stages]


def waited(timeline: RequestTimeline, stage: int) -> dict[str, float]:
    """Milliseconds, by reason."""
    return {reason: ns / MS for reason, ns in timeline.stages[stage].waited.items()}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static", batch_size=3)], ids=lambda batching: batching.kind)
def test_ways_through_a_real_engine_have_no_holes(batching: Batching, depth: int) -> None:
    told = Told()
    recorder = Recorder()
    recorder.add_reader(told)
    tight = SchedulerLimits(max_model_len=40, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    rehearsal = Rehearsal(engine(limits=tight, batching=batching), [recorder], depth=depth, seed=2)
    rehearsal.play(40)
    for number in rehearsal.num_outputs:
        recorder.sent(number, 0, rehearsal.clock(), 1)
    assert sorted(one.request.number for one in told.timelines) == sorted(rehearsal.num_outputs)
    assert batching.kind == "static" or any(one.num_preemptions for one in told.timelines)
    total: Counter[str] = Counter()
    for one in told.timelines:
        for stage, following in pairwise(one.stages):
            assert stage.end_ns == following.start_ns, one.stages
        assert one.stages[0].start_ns == one.request.timing.received_ns
        assert [stage.name for stage in one.stages[:3]] == ["tokenizing", "queue", "prefill"]
        assert one.stages[-1].name == "sending" and one.num_output == rehearsal.num_outputs[one.request.number]
        assert one.num_published == one.num_at_end
        for stage in one.stages:
            waits = stage.name in ("queue", "preempted")
            assert sum(stage.waited.values()) == (stage.end_ns - stage.start_ns) * waits
            total.update(stage.waited)
    assert total == recorder.timelines.waiting.waited_ns(), "all requests together waited as long as each of them"


def test_a_way_with_everything_in_it() -> None:
    (life,) = told([
        request(0, 5, received_ns=2 * MS, tokenized_ns=4 * MS),
        step(10, taken=(6 * MS,), refused=(Decision(0, "no_slot"),), stop=Stop("no_slot", 0, 0)),
        step(20, refused=(Decision(9, "no_blocks"),), stop=Stop("no_blocks", 9, 1)),
        step(30, numbers=(0,), tokens=((),), admitted=(Admission(0, 2),)),
        step(40, numbers=(0,), tokens=((7,),)),
        step(50, numbers=(0,), tokens=((7,),)),
        step(60, preempted=(Preemption(0, "no_blocks", 5),), refused=(Decision(0, "no_blocks"),),
             stop=Stop("no_blocks", 0, 0)),
        step(70, numbers=(0,), tokens=((),), admitted=(Admission(0, 4),)),
        step(80, numbers=(0,), tokens=((7,),)),
        step(90, numbers=(0,), tokens=((7,),), ended=(RequestEnd(0, "length", 4),)),
        Sent(0, 51 * MS, 103 * MS, 4)])
    assert stages(life) == [
        ("tokenizing", 2, 5), ("queue", 5, 30), ("prefill", 30, 50), ("decode", 50, 60), ("preempted", 60, 70),
        ("recompute", 70, 90), ("decode", 90, 100), ("sending", 100, 103)]
    assert waited(life, 1) == {"step_under_way": 5, "no_slot": 10, "no_blocks": 10}
    assert waited(life, 4) == {"no_blocks": 10}
    assert (life.num_cached, life.num_preemptions, life.num_output, life.end_reason) == (2, 1, 4, "length")
    assert (life.start_ns, life.first_token_ns, life.closed_ns) == (2 * MS, 50 * MS, 103 * MS)


def test_a_request_without_an_answer_has_the_reason_of_its_end() -> None:
    waits, runs = told([
        request(0, 5), request(1, 6), step(10, numbers=(1,), tokens=((3,),), admitted=(Admission(1, 0),),
                                           refused=(Decision(0, "no_slot"),), stop=Stop("no_slot", 0, 0)),
        CommandEntry(22 * MS, 0, "abort"),
        record_of(-1, 24 * MS, 24 * MS, ended=(RequestEnd(0, "abort", 0), RequestEnd(1, "error", 1,
                                                                                     "the forward pass broke")))])
    assert stages(waits) == [("queue", 5, 22)] and waits.end_reason == "abort"
    assert stages(runs) == [("queue", 6, 10), ("prefill", 10, 20), ("decode", 20, 24)]
    assert runs.message == "the forward pass broke"


def test_a_stop_string_ends_the_way_where_it_was_found() -> None:
    """The response is sent before the engine hears of it."""
    (life,) = told([
        request(0, 0), step(10, numbers=(0,), tokens=((3,),), admitted=(Admission(0, 0),)),
        CommandEntry(23 * MS, 0, "stop"), Sent(0, 21 * MS, 24 * MS, 2),
        step(20, numbers=(0,), tokens=((4,),), ended=(RequestEnd(0, "stop", 2),))])
    assert stages(life)[-2:] == [("decode", 20, 23), ("sending", 23, 24)] and life.closed_ns == 24 * MS


def test_what_waits_for_its_sending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_UNSENT", 2)
    ends = tuple(RequestEnd(number, "stop", 1) for number in range(5))
    lives = told([*(request(number, 0) for number in range(5)), step(10, ended=ends)])
    assert [life.request.number for life in lives] == [0, 1, 2]


def test_another_engine_knows_no_request() -> None:
    info = engine()
    run = Run(FORMAT, "1", "toy", "float32", "cpu", 0.0, 0, info.limits, info.scheduling)
    assert told([request(0, 0), run, step(10, ended=(RequestEnd(0, "stop", 1),)), Sent(0, 0, MS, 1)]) == []


class Plain:
    """What `Timelines` says about tokens, slots and reasons, by a loop over every row of every step."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.num_tokens: Counter[int] = Counter()
        self.last: dict[int, int] = {}
        self.gaps: list[int] = []
        self.computed: dict[int, tuple[int, int]] = {}  # slot and tokens
        for entry in entries:
            if isinstance(entry, StepRecord):
                self._step(entry)

    def _step(self, step: StepRecord) -> None:
        for row, number in enumerate(step.plan.request_ids):
            self.computed[number] = step.plan.slots[row], step.plan.starts[row] + step.plan.counts[row]
            if tokens := step.tokens[row]:
                self.num_tokens[number] += len(tokens)
                if number in self.last:
                    self.gaps.append(step.ended_ns - self.last[number])
                self.last[number] = step.ended_ns


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static", batch_size=2), Batching(prefill="alone")],
                         ids=lambda batching: f"{batching.kind}-{batching.prefill}")
def test_what_is_counted_together_is_what_each_row_had(batching: Batching, depth: int) -> None:
    entries = Recorded(4, batching, depth=depth).play(80)
    fold, gaps, num_tokens = Timelines(), Counter(), 0
    for at, entry in enumerate(entries):
        changes = fold.apply(entry)
        gaps.update(changes.gaps)
        num_tokens += changes.num_tokens
        if at % 37 and at != len(entries) - 1:
            continue
        plain = Plain(entries[: at + 1])
        assert gaps == Counter(plain.gaps) and num_tokens == plain.num_tokens.total()
        for number, one in fold.by_number.items():
            assert one.num_published == plain.num_tokens[number] and one.last_token_ns == plain.last.get(number, 0)
            if one.slot >= 0:
                assert (one.slot, one.computed) == plain.computed[number]
    assert num_tokens > 250


def test_a_log_that_begins_later_knows_who_has_a_slot() -> None:
    """As `GET /events` begins: with the run, the unfinished requests, and the steps to come."""
    run = Run(FORMAT, "1", "toy", "float32", "cpu", 0.0, 0, engine().limits, engine().scheduling)
    fold = Timelines()
    for entry in (
            run, request(0, 1), request(1, 2), request(2, 3),
            step(50, (1,), tokens=((7,),), refused=(Decision(2, "no_blocks"),), stop=Stop("no_blocks", 2, 0),
                 taken=(41 * MS,))):
        fold.apply(entry)
    runs, waits = fold.by_number[1], fold.by_number[2]
    assert (runs.stage, runs.slot, runs.computed) == ("decode", 1, 5)
    assert waits.is_waiting and fold.reason(waits) == "no_blocks"
    assert not any(one.is_whole for one in fold.by_number.values()) and gather([run]) == {}


def choices(ends_ms: Sequence[int]) -> list[Entry]:
    """The choices of one response, each with the end of its only step."""
    run = Run(FORMAT, "1", "toy", "float32", "cpu", 0.0, 0, engine().limits, engine().scheduling)
    ended = [record_of(-1, 0, ms * MS, ended=(RequestEnd(number, "stop", 1),)) for number, ms in enumerate(ends_ms)]
    return [run,
            *(RequestEntry(MS, 4, Add(number, RequestSpec((), SamplingSpec()), name=f"cmpl-x-{number}"))
              for number in range(len(ends_ms))),
            *ended]


@pytest.mark.parametrize("ends", [(5,), (5, 7), (7, 5, 3), (5, 9, 9, 2), (9, 9, 9)])
def test_each_choice_knows_the_last_end_of_the_others(ends: tuple[int, ...]) -> None:
    told = [timeline.siblings_ended_ns // MS for timeline in gather(choices(ends)).values()]
    assert told == [max([end for at, end in enumerate(ends) if at != own], default=0) for own in range(len(ends))]


def test_choices_are_not_compared_each_with_each() -> None:
    def work(num_choices: int) -> int:
        """Instructions run to gather a log."""
        entries, count = choices(range(2, 2 + num_choices)), 0

        def counted(frame: FrameType, event: str, _: object) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return counted

        before = sys.gettrace()
        sys.settrace(counted)
        try:
            gather(entries)
        finally:
            sys.settrace(before)
        return count

    assert work(400) < 3 * work(200)

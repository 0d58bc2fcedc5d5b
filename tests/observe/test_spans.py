from __future__ import annotations

from itertools import pairwise

import pytest
from toy_engine import MS, Rehearsal, engine

from slotwise.batching.settings import Batching
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.observe import spans
from slotwise.observe.event_log import (
    Admission,
    Command,
    End,
    Entry,
    Preemption,
    Refused,
    Request,
    Run,
    Sent,
    Step,
    Stop,
)
from slotwise.observe.recorder import Recorder
from slotwise.observe.spans import RequestSpans, Spans


def request(number: int, at_ms: float, **more: object) -> Request:
    return Request(number, f"cmpl-{number}-0", round(at_ms * MS), 4, SamplingParams(), 0, **more)


def step(at_ms: int, **columns: object) -> Step:
    """Ten milliseconds."""
    return Step(at_ms, at_ms * MS, (at_ms + 10) * MS, **columns)


def told(entries: list[Entry]) -> list[RequestSpans]:
    folding = Spans()
    return [life for entry in entries for life in folding.feed(entry)]


def stages(life: RequestSpans) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_ns / MS, span.end_ns / MS) for span in life.spans]


class Told:
    """Those whose way is complete."""

    def __init__(self) -> None:
        self.lives: list[RequestSpans] = []
        self._spans = Spans()

    def write(self, entry: Entry) -> None:
        self.lives += self._spans.feed(entry)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", [Batching(), Batching("static", batch_size=3)], ids=lambda batching: batching.kind)
def test_ways_through_a_real_engine_have_no_holes(batching: Batching, depth: int) -> None:
    told = Told()
    recorder = Recorder()
    recorder.tell(told)
    tight = SchedulerLimits(max_model_len=40, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    rehearsal = Rehearsal(engine(limits=tight, batching=batching), [recorder], depth=depth, seed=2)
    rehearsal.play(40)
    for name in rehearsal.num_outputs:
        recorder.sent(name, 0, rehearsal.clock(), 1)
    assert sorted(life.request.id for life in told.lives) == sorted(rehearsal.num_outputs)
    assert batching.kind == "static" or any(life.num_preemptions for life in told.lives)
    for life in told.lives:
        for span, following in pairwise(life.spans):
            assert span.end_ns == following.start_ns, life.spans
        assert life.spans[0].start_ns == life.request.received_ns
        assert [span.name for span in life.spans[:3]] == ["tokenising", "queue", "prefill"]
        assert life.spans[-1].name == "sending" and life.num_output == rehearsal.num_outputs[life.request.id]
        for span in life.spans:
            waits = span.name in ("queue", "preempted")
            assert sum(span.waited.values()) == pytest.approx((span.end_ns - span.start_ns) * 1e-9 * waits)


def test_a_way_with_everything_in_it() -> None:
    (life,) = told([
        request(0, 5, received_ns=2 * MS, tokenised_ns=4 * MS),
        step(10, refused=(Refused(0, "no_slot"),), stop=Stop("no_slot", 0, 0)),
        step(20, refused=(Refused(9, "no_blocks"),), stop=Stop("no_blocks", 9, 1)),
        step(30, numbers=(0,), tokens=((),), admitted=(Admission(0, 2),)),
        step(40, numbers=(0,), tokens=((7,),)),
        step(50, numbers=(0,), tokens=((7,),)),
        step(60, preempted=(Preemption(0, "no_blocks", 5),), refused=(Refused(0, "no_blocks"),),
             stop=Stop("no_blocks", 0, 0)),
        step(70, numbers=(0,), tokens=((),), admitted=(Admission(0, 4),)),
        step(80, numbers=(0,), tokens=((7,),)),
        step(90, numbers=(0,), tokens=((7,),), ended=(End(0, "length", 4),)),
        Sent(0, 51 * MS, 103 * MS, 4)])
    assert stages(life) == [
        ("tokenising", 2, 5), ("queue", 5, 30), ("prefill", 30, 50), ("decode", 50, 60), ("preempted", 60, 70),
        ("recompute", 70, 90), ("decode", 90, 100), ("sending", 100, 103)]
    assert {name: round(seconds, 9) for name, seconds in life.spans[1].waited.items()} == {
        "step_under_way": 0.005, "no_slot": 0.010, "no_blocks": 0.010}
    assert {name: round(seconds, 9) for name, seconds in life.spans[4].waited.items()} == {"no_blocks": 0.010}
    assert (life.num_cached, life.num_preemptions, life.num_output, life.end_reason) == (2, 1, 4, "length")
    assert (life.start_ns, life.first_token_ns, life.end_ns) == (2 * MS, 50 * MS, 103 * MS)


def test_whoever_is_not_answered_is_told_at_its_end() -> None:
    waits, runs = told([
        request(0, 5), request(1, 6), step(10, numbers=(1,), tokens=((3,),), admitted=(Admission(1, 0),),
                                           refused=(Refused(0, "no_slot"),), stop=Stop("no_slot", 0, 0)),
        Command(22 * MS, 0, "abort"),
        Step(-1, 24 * MS, 24 * MS, ended=(End(0, "abort", 0), End(1, "error", 1, "the forward pass broke")))])
    assert stages(waits) == [("queue", 5, 22)] and waits.end_reason == "abort"
    assert stages(runs) == [("queue", 6, 10), ("prefill", 10, 20), ("decode", 20, 24)]
    assert runs.message == "the forward pass broke"


def test_a_stop_string_ends_the_way_where_it_was_found() -> None:
    """The response is sent before the engine hears of it."""
    (life,) = told([
        request(0, 0), step(10, numbers=(0,), tokens=((3,),), admitted=(Admission(0, 0),)),
        Command(23 * MS, 0, "stop"), Sent(0, 21 * MS, 24 * MS, 2),
        step(20, numbers=(0,), tokens=((4,),), ended=(End(0, "stop", 2),))])
    assert stages(life)[-2:] == [("decode", 20, 23), ("sending", 23, 24)] and life.end_ns == 24 * MS


def test_what_waits_for_its_sending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_UNSENT", 2)
    ends = tuple(End(number, "stop", 1) for number in range(5))
    lives = told([*(request(number, 0) for number in range(5)), step(10, ended=ends)])
    assert [life.request.number for life in lives] == [0, 1, 2]


def test_another_engine_knows_nobody() -> None:
    info = engine()
    run = Run("1", "toy", "float32", "cpu", 0.0, 0, info.limits, info.scheduling)
    assert told([request(0, 0), run, step(10, ended=(End(0, "stop", 1),)), Sent(0, 0, MS, 1)]) == []

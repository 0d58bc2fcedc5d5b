"""What the index of a ring finds and extracts, against a pass over the whole log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.played import Play
from support.records import record_of

from slotwise.core.params import SamplingSpec
from slotwise.core.record import RequestEnd, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import StepTimeModel, work_of
from slotwise.engine.messages import Add
from slotwise.observe import event_log
from slotwise.observe.event_log import Entry
from slotwise.observe.explain import CALLS, explain
from slotwise.observe.fold import gather
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.ring import Ring
from slotwise.observe.step_view import times_of

pytestmark = pytest.mark.slow

MOST = 16


def passed_over(ring: Ring) -> tuple[list[Entry], dict[int, RequestTimeline]]:
    entries = list(map(event_log.decode, ring.lines()))
    return entries, gather(entries)


def extracted(ring: Ring, found: list[RequestTimeline], times: StepTimeModel) -> list[dict[str, Any]]:
    """By the function that a worker runs, through the bytes it is sent."""
    sent = msgspec.msgpack.encode((*ring.extract(found), times.prediction(), 0))
    return CALLS["explain"](*msgspec.msgpack.decode(sent))


@pytest.mark.parametrize(("capacity", "depth"), [(60_000, 0), (60_000, 1), (4 << 20, 1)])
def test_every_request_whose_steps_are_there_is_explained_as_by_the_whole_log(capacity: int, depth: int) -> None:
    play = Play(7, depth=depth).run(50, arriving=(0, 0, 0, 1, 1))
    times, ring = times_of(play.entries), Ring(capacity)
    compared = 0
    for at, entry in enumerate(play.entries):
        ring.append(entry, event_log.line_of(entry))
        if at % 151 and at != len(play.entries) - 1:
            continue
        written = play.entries[: at + 1]
        _, there = passed_over(ring)
        whole = gather(written)
        for name in sorted({facts.response_id for facts in whole.values()}):
            wanted = [explain(facts, written, times).as_json() for facts in whole.values()
                      if facts.is_named(name) and facts.position + 1 >= ring.first]
            found = ring.named("", name, MOST)
            assert extracted(ring, found, times) == wanted[-MOST:], name
            assert ring.numbered([facts.request.number for facts in found], MOST) == found
            compared += len(wanted)
            assert {facts.request.number for facts in found} <= there.keys()
    assert compared >= 12


def test_only_lines_of_its_life_are_extracted() -> None:
    play = Play(7).run(120, arriving=(0, 0, 0, 1, 1))
    ring = Ring()
    for entry in play.entries:
        ring.append(entry, event_log.line_of(entry))
    entries, expected = passed_over(ring)
    shares = []
    for facts in expected.values():
        (found,) = ring.named("", facts.response_id, MOST)
        lines = list(map(event_log.decode, ring.extract([found]).lines.splitlines()))
        assert all(isinstance(line, StepRecord | event_log.CommandEntry | event_log.EngineLost) for line in lines)
        life = [line for line in lines if isinstance(line, StepRecord) and line.step >= 0]
        assert all(line.ended_ns >= facts.request.ns for line in life)
        assert all(facts.request.number not in line.plan.request_ids for line in entries[facts.over_at + 1:]
                   if isinstance(line, StepRecord))
        shares.append(len(lines) / len(entries))
    assert sum(shares) / len(shares) < 0.2


def request(number: int, name: str, salt: str) -> event_log.RequestEntry:
    return event_log.RequestEntry(number + 1, 4, Add(
        number, RequestSpec((), SamplingSpec(), salt=salt), name=f"cmpl-{name}-{number}"))


def test_what_is_gone_from_the_ring_is_gone_from_the_index() -> None:
    ring = Ring(80_000)
    for number in range(2000):
        entry = request(number, "x", "one")
        ring.append(entry, event_log.line_of(entry))
        step = record_of(number, number + 1, number + 2, numbers=(number,), slots=(0,), starts=(0,), counts=(4,),
                              tokens=((5,),), ended=(RequestEnd(number, "length", 1),))
        ring.append(step, event_log.line_of(step))
    known = len(gather(map(event_log.decode, ring.lines())))
    assert 10 < len(ring.named("", "x", 9999)) <= known < 200
    assert len(ring._index._together) <= known + 1 and len(ring._index._named) <= 2
    assert sum(map(len, ring._index._named.values())) <= 2 * (known + 1)


def test_the_latest_of_a_name_and_only_a_tenants_own() -> None:
    ring = Ring()
    for number in range(100):
        entry = request(number, "x", ("one", "two", "one:salt")[number % 3])
        ring.append(entry, event_log.line_of(entry))
    assert [facts.request.number for facts in ring.named("two", "x", 3)] == [91, 94, 97]
    assert [facts.request.number for facts in ring.named("one", "cmpl-x", 3)] == [96, 98, 99]
    assert [facts.request.number for facts in ring.named("", "x", 3)] == [97, 98, 99]
    assert [facts.request.number for facts in ring.named("one", "cmpl-x-0", 3)] == [0]
    assert ring.named("two", "cmpl-x-0", 3) == ring.named("two", "nobody", 3) == ring.named("three", "x", 3) == []


def test_a_prediction_is_that_of_the_model() -> None:
    play = Play(3).run(80)
    times = times_of(play.entries)
    again = StepTimeModel.predicting(times.prediction())
    assert times.is_trained
    for entry in play.entries:
        if isinstance(entry, StepRecord) and entry.plan.request_ids:
            work = work_of(entry.plan.starts, entry.plan.counts, entry.plan.padding)
            assert again.typical(work) == times.typical(work) > 0

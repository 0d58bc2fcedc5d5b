"""Where requests' time went: against what their clients waited, what the log says, and what they would take alone."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest
from support.played import LIMITS, MS, Play
from support.records import record_of

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NO_STEP, Admission, RequestEnd, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import StepTimeModel, Work, work_of
from slotwise.engine.messages import Add, Timing
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import event_log, log_file
from slotwise.observe.event_log import Entry
from slotwise.observe.explain import PARTS, STEP_UNDER_WAY, Explanation, Solo, explain
from slotwise.observe.fold import gather
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_view import times_of

DISCIPLINES = (Batching("static", batch_size=4), Batching("orca"), Batching(prefill="alone"),
               Batching("dynamic", batch_size=3, max_wait_ms=5), Batching("one_at_a_time"))


@cache
def crowd(depth: int = 0) -> tuple[Play, list[Entry], dict[str, Explanation]]:
    """Five hundred requests in a cache that is too small, some of which leave: the stories of them all, by id."""
    play = Play(7, depth=depth).run(500, arriving=(0, 0, 0, 1, 1))
    entries = play.entries
    return play, entries, explanations(entries)


def explanations(entries: list[Entry]) -> dict[str, Explanation]:
    times = times_of(entries)
    return {timeline.request.id: explain(timeline, entries, times) for timeline in gather(entries).values()}


def steps(entries: list[Entry]) -> dict[int, StepRecord]:
    return {entry.step: entry for entry in entries if isinstance(entry, StepRecord)}


def check_sums(play: Play, told: dict[str, Explanation]) -> None:
    assert told.keys() == play.waited.keys()
    for name, explanation in told.items():
        assert explanation.total_ns == play.waited[name] == sum(share.ns
                                                                for share in explanation.shares), explanation.timeline
        assert all(span.ns > 0 and span.part in PARTS for span in explanation.spans)


def check_reasons(entries: list[Entry], told: dict[str, Explanation]) -> None:
    """Each wait for a reason names a step, and that step's plan names the request and the reason."""
    by_number = steps(entries)
    for explanation in told.values():
        number = explanation.timeline.request.number
        for span in explanation.spans:
            if span.part not in ("queue", "preempted", "paused"):
                assert not span.reason
                continue
            step = by_number[span.step]
            if span.reason == STEP_UNDER_WAY:
                assert step.started_ns < explanation.timeline.taken_ns or not explanation.timeline.taken_ns
                continue
            assert number not in step.plan.request_ids
            given = [one.reason for one in (*step.plan.refused, *step.preempted) if one.request_id == number]
            assert span.reason in given or (not given and step.plan.stop.reason == span.reason), (span, step)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_parts_of_five_hundred_requests_are_what_their_clients_waited(depth: int) -> None:
    play, _, told = crowd(depth)
    assert len(told) == 500
    check_sums(play, told)
    ends = Counter(explanation.timeline.end_reason for explanation in told.values())
    assert set(ends) == {"length", "stop", "abort", "timeout"}
    parts = {(share.part, share.reason) for explanation in told.values() for share in explanation.shares}
    assert {"tokenizing", "handing_over", "prefill", "decode", "neighbors", "recompute", "sending"} <= {
        part for part, _ in parts}
    assert {("queue", "no_slot"), ("queue", "no_blocks"), ("queue", "token_budget"), ("queue", STEP_UNDER_WAY),
            ("preempted", "no_blocks")} <= parts
    assert any(explanation.num_cached for explanation in told.values()) and any(explanation.num_preemptions
                                                                                for explanation in told.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_each_reason_stands_in_the_plan_of_the_step_it_names(depth: int) -> None:
    _, entries, told = crowd(depth)
    check_reasons(entries, told)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", DISCIPLINES, ids=lambda batching: f"{batching.kind}-{batching.prefill}")
def test_every_discipline_is_explained(batching: Batching, depth: int) -> None:
    play = Play(3, depth=depth, batching=batching).run(80)
    told = explanations(play.entries)
    check_sums(play, told)
    check_reasons(play.entries, told)
    if batching.kind in ("static", "dynamic"):
        assert sum(explanation.ns("held") for explanation in told.values()) > 0
    if batching.prefill == "alone":
        assert any(share[:2] == ("paused", "prompts_alone") for explanation in told.values()
                   for share in explanation.shares)


def test_what_decode_would_take_alone_is_what_it_takes_alone() -> None:
    """Of those who were never alone, against a run of the same request with nobody else."""
    _, entries, told = crowd()
    times = times_of(entries)
    checked = 0
    for explanation in told.values():
        timeline = explanation.timeline
        if timeline.end_reason != "length" or timeline.num_output < 10 or not explanation.ns("neighbors"):
            continue
        alone = Play(1)
        name = alone.arrive(timeline.request.num_prompt, timeline.num_output)
        alone.run(1, leaving=0.0)
        (timeline,) = gather(alone.entries).values()
        measured = explain(timeline, alone.entries, times)
        assert measured.timeline.request.id == name and not measured.ns("neighbors")
        assert explanation.ns("decode") == pytest.approx(measured.ns("decode"), rel=0.15)
        checked += 1
        if checked == 50:
            return
    raise AssertionError(f"only {checked} requests had neighbors")


def test_a_request_alone_has_no_neighbors_and_nothing_is_guessed_about_it() -> None:
    play = Play(5)
    play.arrive(20, 8)
    play.run(1, leaving=0.0)
    (timeline,) = gather(play.entries).values()
    known, unknown = (explain(timeline, play.entries, times) for times in (times_of(play.entries), StepTimeModel()))
    assert known.shares == unknown.shares
    computed = [entry for entry in play.entries if isinstance(entry, StepRecord) and entry.plan.request_ids]
    assert known.ns("prefill") + known.ns("decode") == sum(step.ended_ns - step.started_ns for step in computed)
    assert {share.part for share in known.shares} <= {
        "tokenizing", "handing_over", "scheduling", "prefill", "decode", "sending"}


def test_pieces_of_a_prompt_are_shares_of_what_it_would_take_alone() -> None:
    times = StepTimeModel()
    for tokens in range(1, 200):
        times.learn(work_of([0], [tokens]), 0.002 + 1e-5 * tokens)
    solo = Solo(times, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=64))
    whole = solo.chunk(first=0, known=100, start=0, count=100)
    assert whole == pytest.approx((0.002 + 0.002 + 1e-3) * 1e9, rel=0.02), "alone, it runs in two steps"
    assert sum(solo.chunk(0, 100, start, 10) for start in range(0, 100, 10)) == pytest.approx(whole, abs=10)
    solo.scheduled(Scheduling(Batching(prefill="inline"), max_num_seqs=4, max_num_batched_tokens=64))
    assert solo.chunk(0, 100, 0, 100) == pytest.approx(0.003 * 1e9, rel=0.02), "in one, where it is not cut"
    assert Solo(StepTimeModel(), None).token(5) == 0


class Counted(StepTimeModel):
    """A model that counts its predictions."""

    num_predictions = 0

    def typical(self, work: Work) -> float:
        self.num_predictions += 1
        return super().typical(work)


@pytest.mark.parametrize("chunk", [2, 3, 64])
@pytest.mark.parametrize(("first", "start", "count", "known"), [
    (0, 0, 1000, 1000), (0, 5, 990, 1200), (7, 7, 64, 500), (7, 70, 700, 770), (0, 64, 129, 193), (3, 4, 1, 9)])
def test_many_chunks_are_timed_as_each_of_them_is_by_a_few_predictions(
        chunk: int, first: int, start: int, count: int, known: int) -> None:
    times = Counted()
    for tokens in range(2, 200):
        times.learn(work_of([tokens], [tokens]), 0.002 + 1e-5 * tokens + 1e-6 * tokens * tokens)
    solo = Solo(times, Scheduling(Batching(), max_num_seqs=4, max_num_batched_tokens=chunk))
    each = 0.0
    for at in range(start, start + count):  # each token's share of its chunk
        low = first + (at - first) // chunk * chunk
        high = min(low + chunk, known)
        each += times.typical(work_of([low], [high - low])) / (high - low)
    times.num_predictions = 0
    assert solo.chunk(first, known, start, count) == pytest.approx(each * 1e9, rel=1e-9, abs=2)
    assert times.num_predictions <= 4
    times.num_predictions = 0
    assert solo.chunk(0, 2**31, 1, 2**31 - 1) > 0 and times.num_predictions <= 4


def test_a_living_request_is_explained_as_far_as_the_log_goes() -> None:
    play = Play(2)
    play.arrive(20, 30)
    entries = play.run(1, leaving=0.0).entries
    last = max(at for at, entry in enumerate(entries) if isinstance(entry, StepRecord) and not entry.ended)
    (timeline,) = gather(entries[: last + 1]).values()
    explanation = explain(timeline, entries[: last + 1], times_of(entries))
    assert not timeline.ended and timeline.total_ns == 0
    assert explanation.total_ns == entries[last].ended_ns - timeline.received_ns and not explanation.ns("sending")
    assert explanation.as_json()["finish_reason"] is None


def test_one_whose_first_steps_are_forgotten_is_not_explained() -> None:
    """The ring keeps the request, for who draws must know it; its steps are gone."""
    play = Play(2)
    play.run(30, leaving=0.0)
    whole = play.entries
    first = next(at for at, entry in enumerate(whole) if isinstance(entry, StepRecord) and entry.step == 20)
    there = [entry for entry in whole[:first] if isinstance(entry, event_log.Run | event_log.RequestEntry)]
    cut = gather([*there, *whole[first:]])
    began = whole[first].started_ns
    assert cut and all(timeline.request.ns >= began for timeline in cut.values())
    complete = gather(whole)
    assert {number: timeline.ended_ns for number, timeline in cut.items()} == {
        number: timeline.ended_ns for number, timeline in complete.items() if timeline.request.ns >= began}


def request(number: int, name: str, ns: int, salt: str = "", **timing: int) -> event_log.RequestEntry:
    spec = RequestSpec((), SamplingSpec(), salt=salt)
    return event_log.RequestEntry(ns, 4, Add(number, spec, Timing(**timing), name))


def row(step: int, numbers: tuple[int, ...], start: int, **more: object) -> StepRecord:
    """A step of ten milliseconds that begins a millisecond after the last."""
    began = (step * 11 + 1) * MS
    return record_of(step, began, began + 10 * MS, numbers=numbers, slots=numbers, starts=(start,) * len(numbers),
                          counts=(4 if start == 0 else 1,) * len(numbers), tokens=((7,),) * len(numbers),
                          prefills=tuple(range(len(numbers))) if start == 0 else (), **more)


def joined(*numbers: int) -> dict[str, object]:
    return {"admitted": tuple(Admission(number, 0) for number in numbers), "taken": (MS,) * len(numbers)}


def told(timeline: RequestTimeline, entries: list[Entry], until_ns: int = 0) -> dict[str, float]:
    times = StepTimeModel()
    for _ in range(9):
        times.learn(work_of([0], [4]), 0.004)
        times.learn(Work(1, 1, 5, 0), 0.002)
    return {share.part: round(share.ns / MS, 2) for share in explain(timeline, entries, times, until_ns).shares}


def test_choices_of_a_response_wait_for_each_other() -> None:
    entries = [
        request(0, "cmpl-x-0", MS, received_ns=MS // 2), request(1, "cmpl-x-1", MS, received_ns=MS // 2),
        row(0, (0, 1), 0, **joined(0, 1), ended=(RequestEnd(0, "length", 1),)),
        row(1, (1,), 4, ended=(RequestEnd(1, "length", 2),)),
        event_log.Sent(0, 23 * MS, 24 * MS, 1), event_log.Sent(1, 23 * MS, 24 * MS, 1)]
    first, second = gather(entries).values()
    assert told(first, entries) == {"tokenizing": 0.5, "prefill": 4, "neighbors": 6, "siblings": 11, "sending": 2}
    assert told(second, entries) == {
        "tokenizing": 0.5, "scheduling": 1, "prefill": 4, "neighbors": 6, "decode": 10, "sending": 2}
    assert first.is_named("cmpl-x") and first.is_named("x") and not first.is_named("cmpl-x-1")


def test_after_a_stop_string_everything_is_sending() -> None:
    """The engine hears of it in the middle of a step that computes one token too many."""
    entries = [request(0, "cmpl-x-0", MS), row(0, (0,), 0, **joined(0)), event_log.CommandEntry(12 * MS, 0, "stop"),
               row(1, (0,), 4), row(2, (), 0, taken=(22 * MS,), ended=(RequestEnd(0, "stop", 2),))]
    (timeline,) = gather(entries[:3]).values()
    assert told(timeline, entries[:3], until_ns=13 * MS) == {"prefill": 10, "sending": 2}
    entries.append(event_log.Sent(0, 13 * MS, 13 * MS, 1))
    (timeline,) = gather(entries).values()
    assert told(timeline, entries) == {"prefill": 10, "sending": 2} and timeline.end_reason == "stop"


def test_an_abort_in_the_middle_of_a_step_ends_the_story_there() -> None:
    entries = [request(0, "cmpl-x-0", MS), row(0, (0,), 0, **joined(0)), event_log.CommandEntry(15 * MS, 0, "abort"),
               row(1, (0,), 4), row(2, (), 0, taken=(22 * MS,), ended=(RequestEnd(0, "abort", 2),))]
    (timeline,) = gather(entries).values()
    assert told(timeline, entries) == {"prefill": 10, "scheduling": 1, "decode": 3}


def test_an_engine_that_is_lost_takes_the_rest() -> None:
    entries = [request(0, "cmpl-x-0", MS), request(1, "cmpl-y-1", 2 * MS), row(0, (0,), 0, **joined(0)),
               event_log.EngineLost(50 * MS, event_log.LOST, "killed"), record_of(
                   NO_STEP, 50 * MS, 50 * MS,
                   ended=(RequestEnd(0, "error", 0), RequestEnd(1, "error", 0)))]
    running, waiting = gather(entries).values()
    assert told(running, entries) == {"prefill": 10, "failed_step": 39}
    assert told(waiting, entries) == {"queue": 9, "handing_over": 39}


def test_a_failed_step_is_named() -> None:
    entries = [request(0, "cmpl-x-0", MS), row(0, (0,), 0, **joined(0)), record_of(
        NO_STEP, 12 * MS, 15 * MS, ended=(RequestEnd(0, "error", 1, "it broke"),), failure="it broke")]
    (timeline,) = gather(entries).values()
    assert told(timeline, entries) == {"prefill": 10, "scheduling": 1, "failed_step": 3}


def test_a_gap_takes_those_who_lived_with_it() -> None:
    entries = [request(0, "cmpl-x-0", MS), row(0, (0,), 0, **joined(0)), event_log.Gap(3),
               request(1, "cmpl-y-1", 40 * MS),
               row(9, (1,), 0, admitted=(Admission(1, 0),), taken=(41 * MS,))]
    assert list(gather(entries)) == [1]


def test_a_tenant_sees_its_own_and_no_more() -> None:
    entries = [request(0, "cmpl-x-0", MS, salt="one"), request(1, "cmpl-x-1", MS, salt="one:extra"),
               request(2, "cmpl-x-2", MS, salt="two")]
    assert [timeline.belongs_to("one") for timeline in gather(entries).values()] == [True, True, False]
    assert all(timeline.belongs_to("") for timeline in gather(entries).values())


def test_a_log_read_from_a_file_tells_the_same(tmp_path) -> None:
    _, entries, told = crowd()
    path = tmp_path / "events.jsonl"
    path.write_bytes(event_log.encode_lines(entries))
    again = explanations(list(log_file.read_file(path)))
    assert {name: explanation.spans for name, explanation in again.items()} == {name: explanation.spans for name,
                                                                                explanation in told.items()}
    assert next(entry for entry in log_file.read_file(path) if isinstance(entry, event_log.Run)).limits == LIMITS
    assert msgspec.json.encode([explanation.as_json() for explanation in again.values()])

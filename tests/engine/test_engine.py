"""The engine's loop over a fake executor: plan, execute, commit, and what happens when a step breaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from support.records import admitted_of, cached_of
from support.toy import EOS, alone, next_token, request, scheduler

from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NO_STEP, StepRecord, StepResult, TokenLogprobs
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.engine import Engine
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.messages import Add, Configure, Finish
from slotwise.engine.scheduling import Scheduling

LIMITS = SchedulerLimits(max_model_len=64, num_blocks=8, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)


class Breaking(FakeExecutor):
    """Fails on the steps named, after taking in what their plans say."""

    def __init__(self, *broken: int) -> None:
        super().__init__(LIMITS.block_size, next_token)
        self._broken = broken


    def collect(self) -> StepResult:
        result = super().collect()
        if result.step in self._broken:
            raise ArithmeticError(f"step {result.step} broke")
        return result


class Certain(FakeExecutor):
    """Gives every token a log-probability, with the token itself as the rank, so that mixed-up ones show."""

    def __init__(self) -> None:
        super().__init__(LIMITS.block_size, next_token)

    def collect(self) -> StepResult:
        result = super().collect()
        return result._replace(logprobs=tuple(
            tuple(TokenLogprobs(0.0, token, (), ()) for token in tokens) for tokens in result.tokens))


def engine(executor: FakeExecutor | None = None, depth: int = 0, batching: Batching | None = None) -> Engine:
    ticks = count()
    discipline = (batching or Batching()).discipline(LIMITS.max_num_seqs)
    return Engine(
        scheduler(LIMITS, discipline), executor or Breaking(), lambda: next(ticks), (EOS,), depth=depth)


def add(name: str, length: int = 6, **params: object) -> Add:
    return Add(name, RequestSpec([3, 1, 4], SamplingSpec(max_tokens=length, **params)))


def run(subject: Engine, most_steps: int = 500) -> list[StepRecord]:
    records = []
    while subject.has_work:
        records.append(subject.step())
        assert len(records) < most_steps, "the engine never comes to rest"
    return records


def outputs(records: list[StepRecord]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            found.setdefault(name, []).extend(tokens)
    return found


def expected(length: int) -> list[int]:
    return alone(request("any", [3, 1, 4], length, ignore_eos=True), LIMITS)


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_do_not_depend_on_how_far_ahead_is_planned(depth):
    subject = engine(depth=depth)
    for name in "abcdefg":
        subject.handle(add(name, 5 + ord(name) % 4, ignore_eos=True))
    records = run(subject)
    assert outputs(records) == {name: expected(5 + ord(name) % 4) for name in "abcdefg"}
    ends = [end.request_id for record in records for end in record.ended]
    assert sorted(ends) == sorted("abcdefg")


def test_a_record_tells_who_ran_who_joined_who_waits_and_why():
    subject = engine()
    for name in "abcd":
        subject.handle(add(name, ignore_eos=True))
    record = subject.step()
    assert record.plan.request_ids == admitted_of(record) == ("a", "b", "c")
    assert record.plan.counts == (3, 3, 2) and record.plan.stop == ("no_slot", "d", 0, None)
    assert (record.counters.num_running, record.counters.num_waiting, record.counters.num_free_blocks) == (3, 1, 5)
    assert record.started_ns < record.ended_ns


@pytest.mark.parametrize("depth", [0, 1])
def test_a_broken_step_ends_its_rows_and_nobody_else(depth):
    subject = engine(Breaking(2), depth)
    for name in "abc":
        subject.handle(add(name, ignore_eos=True))
    subject.handle(add("later", ignore_eos=True))
    records = run(subject)
    ends = {end.request_id: end for record in records for end in record.ended}
    assert {name: end.reason for name, end in ends.items()} == dict.fromkeys("abc", "error") | {"later": "length"}
    assert "step 2 broke" in ends["a"].message and ends["later"].message == ""
    assert outputs(records)["later"] == expected(6)


def test_a_row_that_cannot_sample_ends_alone_and_is_told_why():
    class FirstRowFails(FakeExecutor):
        def collect(self) -> StepResult:
            result = super().collect()
            broken = result.step == 2
            return result._replace(tokens=((), *result.tokens[1:]), failed=(0,)) if broken else result

    subject = engine(FirstRowFails(LIMITS.block_size, next_token))
    for name in "ab":
        subject.handle(add(name, ignore_eos=True))
    records = run(subject)
    ends = {end.request_id: end for record in records for end in record.ended}
    assert ends["a"].reason == "error" and "probabilities" in ends["a"].message
    assert ends["b"].reason == "length" and outputs(records)["b"] == expected(6)
    assert records[-1].counters.num_free_blocks == LIMITS.num_blocks


def test_an_abort_between_steps_shows_in_the_next_record():
    subject = engine()
    subject.handle(add("gone", ignore_eos=True))
    subject.step()
    subject.handle(Finish("gone", "abort"))
    assert not subject.has_work
    record = subject.idle_record()
    assert record is not None and record.step == NO_STEP
    assert [(end.request_id, end.reason) for end in record.ended] == [("gone", "abort")]
    assert record.counters.num_free_blocks == LIMITS.num_blocks
    assert subject.idle_record() is None


def test_an_impossible_request_is_answered_and_the_engine_stays_idle():
    subject = engine()
    subject.handle(Add("huge", RequestSpec([1] * 40, SamplingSpec(max_tokens=20))))
    assert not subject.has_work
    record = subject.idle_record()
    assert record is not None
    (end,) = record.ended
    assert end.reason == "rejected" and "cache of 32" in end.message


def test_ending_from_outside_is_idempotent():
    subject = engine()
    subject.handle(add("once", ignore_eos=True))
    subject.step()
    subject.handle(Finish("once", "stop"))
    subject.handle(Finish("once", "abort"))
    subject.handle(Finish("never", "abort"))
    record = subject.idle_record()
    assert record is not None and [end.reason for end in record.ended] == ["stop"]


DISCIPLINES = (
    Batching("one_at_a_time"), Batching("static", batch_size=2), Batching("dynamic", batch_size=2, max_wait_ms=0),
    Batching("orca"), Batching(), Batching(prefill="inline"), Batching(prefill="alone"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", DISCIPLINES, ids=lambda batching: f"{batching.kind}-{batching.prefill}")
def test_every_discipline_gives_the_same_tokens_and_tells_each_end_once(batching, depth):
    subject = engine(depth=depth, batching=batching)
    for name in "abcdefg":
        subject.handle(add(name, 5 + ord(name) % 4, ignore_eos=True))
    records = run(subject)
    assert outputs(records) == {name: expected(5 + ord(name) % 4) for name in "abcdefg"}
    ends = [end.request_id for record in records for end in record.ended]
    assert sorted(ends) == sorted("abcdefg")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", DISCIPLINES, ids=lambda batching: f"{batching.kind}-{batching.prefill}")
def test_a_drawn_length_ends_a_request_as_the_model_would(batching, depth):
    subject = engine(depth=depth, batching=batching)
    lengths = {"a": 3, "b": 1, "c": 7, "d": 9}
    for name, length in lengths.items():
        command = add(name, 8, ignore_eos=True)
        command.spec = replace(command.spec, forced_length=length)
        subject.handle(command)
    records = run(subject)
    assert {name: len(tokens) for name, tokens in outputs(records).items()} == {"a": 3, "b": 1, "c": 7, "d": 8}
    reasons = {end.request_id: end.reason for record in records for end in record.ended}
    assert reasons == {"a": "stop", "b": "stop", "c": "stop", "d": "length"}


def test_a_drawn_length_shows_in_no_plan_before_it_is_reached():
    """Neither scheduler nor discipline can have known: until the end, the records are those of a longer request."""
    records = []
    for drawn in (3, 6):
        subject = engine(batching=Batching("orca"))
        command = add("a", 8, ignore_eos=True)
        command.spec = replace(command.spec, forced_length=drawn)
        subject.handle(command)
        records.append(run(subject))
    before = [(r.plan.request_ids, r.plan.counts, r.counters.num_free_blocks) for r in records[0][:2]]
    assert before == [(r.plan.request_ids, r.plan.counts, r.counters.num_free_blocks) for r in records[1][:2]]


def test_log_probabilities_wait_for_the_batch_with_their_tokens():
    subject = engine(Certain(), batching=Batching("static", batch_size=2))
    for name, length in (("short", 2), ("long", 4)):
        subject.handle(add(name, length, ignore_eos=True, logprobs=0))
    records = run(subject)
    assert all(record.logprobs == () for record in records[:-1])
    last = records[-1]
    told = dict(zip(last.plan.request_ids, zip(last.tokens, last.logprobs, strict=True), strict=True))
    for name, length in (("short", 2), ("long", 4)):
        tokens, logprobs = told[name]
        assert tokens == tuple(expected(length)) and [entry.rank for entry in logprobs] == list(tokens)


def test_while_a_window_is_open_only_the_clock_or_a_command_gives_something_to_do():
    subject = engine(batching=Batching("dynamic", batch_size=2, max_wait_ms=1000))
    subject.handle(add("a", 2, ignore_eos=True))
    assert subject.wait() == 0
    record = subject.step()
    assert record.plan.request_ids == () and record.plan.stop.reason == "window_open"
    assert 0.9 < subject.wait() <= 1
    subject.handle(add("b", 2, ignore_eos=True))
    assert subject.wait() == 0
    assert subject.step().plan.request_ids == ("a", "b")


def test_nothing_is_waited_for_while_a_step_is_in_flight():
    subject = engine(depth=1)
    for number in range(2 * LIMITS.max_num_seqs):
        subject.handle(add(f"r{number}", 1, ignore_eos=True))
    while subject.has_work:
        subject.step()
        assert subject.wait() == 0


def test_a_change_is_in_force_at_the_next_plan_and_told_once():
    subject = engine(batching=Batching("static", batch_size=1))
    for name in "abc":
        subject.handle(add(name, 6, ignore_eos=True))
    assert subject.step().plan.request_ids == ("a",)
    changed = Scheduling(Batching(), max_num_seqs=2, max_num_batched_tokens=8)
    subject.handle(Configure(changed))
    record = subject.step()
    assert record.plan.request_ids == ("a", "b") and record.inputs.configured == changed
    assert all(record.inputs.configured is None for record in run(subject))


def test_a_change_while_idle_is_told_between_steps():
    subject = engine()
    changed = Scheduling(Batching("orca"), max_num_seqs=3, max_num_batched_tokens=8)
    subject.handle(Configure(changed))
    record = subject.idle_record()
    assert record.step == NO_STEP and record.inputs.configured == changed
    assert subject.idle_record() is None


def test_who_joins_ahead_is_told_with_the_step_it_joins():
    subject = engine(depth=1)
    for name in "abcde":
        subject.handle(add(name, 3, ignore_eos=True))
    for record in run(subject):
        assert len(admitted_of(record)) == len(cached_of(record))
        assert set(admitted_of(record)) <= set(record.plan.request_ids)


def test_a_record_tells_what_the_clock_showed_and_which_places_changed_hands():
    subject = engine()
    for name in "ab":
        subject.handle(add(name, 3, ignore_eos=True))
    first, *others = run(subject)
    assert (first.inputs.handled, first.inputs.planned, first.ended_ns) == ((0, 1), (2,), 3)
    assert [slot for slot, _, _ in first.plan.new_blocks] == [0, 1] and not any(record.inputs.handled
                                                                                for record in others)
    assert [record.inputs.planned for record in others] == [(record.started_ns,) for record in others]


def test_a_broken_step_tells_whom_it_had_let_in():
    subject = engine(Breaking(0), depth=1)
    subject.handle(add("a", ignore_eos=True))
    record = subject.step()
    assert record.outcome.failure == "ArithmeticError: step 0 broke" and len(record.inputs.planned) == 2
    assert (record.step, admitted_of(record), cached_of(record)) == (NO_STEP, ("a",), (0,))


def test_what_is_sampled_and_not_told_yet_stands_in_the_record():
    subject = engine(batching=Batching("static"))
    subject.handle(add("short", 2, ignore_eos=True))
    subject.handle(add("long", 5, ignore_eos=True))
    records = [record for record in run(subject) if record.step != NO_STEP]
    sampled = [(record.result.tokens)[record.plan.request_ids.index("long")][0] for record in records]
    assert sampled == expected(5)
    assert not any(any(record.tokens) for record in records[:-1]) and records[-1].outcome.tokens

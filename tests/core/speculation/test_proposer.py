"""The proposer in the scheduler: the tokens are those without it, and it stays within what it is given."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import DISCIPLINE, LIMITS, OPERATION, play
from support.toy import VOCAB, Driver, alone, request

from slotwise.core.drafting import MAX_DRAFTS, NO_GAIN, NO_MATCH, RESTING
from slotwise.core.interfaces import DraftRow, Proposal
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.proposer import MAX_LOOKS, UNPAID, DraftProposer, proposer_of
from slotwise.core.speculation.speculation_settings import METHODS, Speculation
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.engine.executor import FakeExecutor

ROOMY = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=40)
FREE = Work(9, 9, 0, 0.0, drafts=8)


def memory_bound() -> StepTimeModel:
    """Steps take a second whatever they compute."""
    times = StepTimeModel()
    for _ in range(20):
        for rows in (1, 2):
            times.learn(Work(rows, rows, 10 * rows, 0.0, longest=10), 1.0)
        times.learn(FREE, 1.0)
    return times


def subject(method: str = "suffix", **given: int) -> DraftProposer:
    return DraftProposer(Speculation(method, **given), memory_bound())


def repeating(prompt: Sequence[int]) -> DraftRow:
    return DraftRow(request("one", prompt, 40), 40)


WORK = Work(1, 1, 12, 0.0)


def proposed(proposer: DraftProposer, rows: Sequence[DraftRow], most: int = 30, work: Work = WORK) -> Proposal:
    """What a step does: asks which rows are due, then for their drafts.  Returns drafts by row of `rows`."""
    due = proposer.due([request for request, _ in rows])
    if not due.places:
        return Proposal([()] * len(rows), due.reason)
    proposal = proposer.propose([rows[place] for place in due.places], len(rows), work, most)
    drafts = dict(zip(due.places, proposal.drafts, strict=True))
    return Proposal([drafts.get(place, ()) for place in range(len(rows))], proposal.reason)


@settings(max_examples=60, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=50), st.sampled_from(("ngram", "suffix")), st.integers(1, 3))
def test_tokens_are_those_without_drafts_and_every_request_ends_once(limits, discipline, operations, method, shortest):
    proposer = subject(method, prompt_lookup_min=shortest)
    driver, expected = play(limits, discipline, operations, proposer)
    for name, reason in driver.ended.items():
        got = driver.output.get(name, [])
        assert got == expected[name] if reason in ("stop", "length") else got == expected[name][: len(got)]
    assert driver.ended.keys() == expected.keys() and driver.scheduler.num_free_blocks == limits.num_blocks
    assert not proposer._rows, "nothing is kept of requests that have ended"


@given(st.lists(st.integers(1, 4), min_size=6, max_size=40), st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_drafts_stay_within_each_limit(prompt, limit, most, number):
    proposer = subject("ngram", num_speculative_tokens=number, prompt_lookup_min=1)
    rows = [repeating(prompt)._replace(limit=limit), DraftRow(request("two", prompt, 40), limit)]
    drafts, _ = proposed(proposer, rows, most)
    assert all(len(found) <= min(limit, number) for found in drafts) and sum(map(len, drafts)) <= most


def test_a_step_says_why_it_has_no_more_drafts():
    cycle = [1, 2, 3, 4, 5, 6, 7] * 6
    assert proposed(subject(num_speculative_tokens=2), [repeating(cycle)]) == ([(1, 2)], MAX_DRAFTS)
    assert proposed(subject(), [repeating(range(1, 20))]) == ([()], NO_MATCH)
    busy = StepTimeModel()
    for rows in (1, 2, 4, 8, 16, 32) * 20:
        busy.learn(Work(rows, rows, 0, 0.0, longest=10), float(rows))
        busy.learn(Work(rows, rows, 0, 0.0, drafts=1), float(rows))
    assert proposed(DraftProposer(Speculation("ngram"), busy), [repeating(cycle)]) == ([()], NO_GAIN)


def test_a_row_whose_drafts_are_wrong_is_looked_at_less_often_and_is_found_again():
    """Continuations disagree for 400 tokens, and are a cycle from then on: unverified guesses tell both."""
    times, noise, drafted = memory_bound(), Random(1), []
    for number in (1, 2, 4, 8, 16) * 20:
        times.learn(Work(1 + number, 1 + number, 0, 0.0, drafts=number), 1 + number / 10)
    proposer, one = DraftProposer(Speculation("suffix"), times), request("one", [1, 2, 3, 4], 1000)
    for at in range(600):
        (drafts,), _ = proposed(proposer, [DraftRow(one, 30)])
        drafted.append(len(drafts))
        one.tokens.append(noise.randrange(VOCAB) if at < 400 else 1 + at % 5)
    assert sum(map(bool, drafted[200:400])) < 20, "there is nothing to gain"
    assert sum(map(bool, drafted[450:])) > 130, "and then there is"


def busy(slope: float) -> StepTimeModel:
    """Each row takes `slope` of the seconds of a step of one."""
    times = StepTimeModel()
    for rows in (1, 2, 4, 8, 16, 32, 64) * 20:
        times.learn(Work(rows, rows, 0, 0.0, longest=10), 1 + slope * (rows - 1))
        times.learn(Work(rows, rows, 0, 0.0, drafts=1), 1 + slope * (rows - 1))
    return times


def test_a_batch_that_no_drafts_pay_for_is_looked_at_again_when_it_is_smaller_or_some_steps_later():
    proposer = DraftProposer(Speculation("ngram"), busy(1.0))
    requests = [request(f"r{number}", [1, 2, 3, 4, 5, 6, 7] * 6, 100) for number in range(32)]
    rows, work = [DraftRow(one, 30) for one in requests], Work(32, 32, 32 * 42, 0.0)
    assert proposed(proposer, rows, work=work).reason == NO_GAIN
    asked = [bool(proposer.due(requests).places) for _ in range(2 * UNPAID)]
    assert asked == [False] * UNPAID + [True] * UNPAID, "until it is asked again, and proposes"
    assert proposed(proposer, rows, work=work).reason == NO_GAIN
    assert proposer.due(requests[:8]).places and not proposer.due(requests).places


def test_rows_that_rest_are_not_due_and_the_step_says_so():
    proposer, one = subject(), request("one", range(1, 20), 100)
    reasons = []
    for _ in range(40):
        reasons.append(proposed(proposer, [DraftRow(one, 30)]).reason)
        one.tokens.append(1000 + len(one.tokens))
    assert set(reasons) == {NO_MATCH, RESTING} and reasons[-10:].count(RESTING) >= 8


def test_a_proposer_is_not_asked_while_all_rows_rest_and_a_request_that_joins_has_its_drafts_at_once(monkeypatch):
    asked = []
    due = DraftProposer.due
    monkeypatch.setattr(DraftProposer, "due", lambda self, requests: asked.append(1) or due(self, requests))
    driver = Driver(replace(ROOMY, max_model_len=400, num_blocks=400), times=memory_bound(), proposer=subject())
    driver.executor = FakeExecutor(4, lambda tokens: zlib.crc32(bytes(tokens)) % VOCAB)
    driver.add(request("one", [3, 1, 4], 300, ignore_eos=True))
    for _ in range(150):
        driver.plan(), driver.commit()
    assert len(asked) < 100 and RESTING in {plan.draft_limit for plan in driver.plans}
    told = request("told", [3, 1, 4], 20, ignore_eos=True)
    told.spec = replace(told.spec, prediction=(1, 5, 9, 2, 6, 5))
    driver.add(told)
    driver.plan(), driver.commit()
    assert driver.plan().drafts[1], "the step behind its prompt"


def test_a_step_looks_at_a_few_rows_in_turns():
    proposer = subject(prompt_lookup_min=1)
    requests = [request(f"r{number}", [1, 2, 3] * 4, 100) for number in range(3 * MAX_LOOKS)]
    turns = [list(proposer.due(requests).places) for _ in range(3)]
    assert [len(places) for places in turns] == [MAX_LOOKS] * 3
    assert sorted(place for places in turns for place in places) == list(range(len(requests)))


def test_a_request_after_one_without_a_gain_is_looked_at_later_unless_it_has_a_prediction():
    proposer, looked = subject(), []
    before = request("before", range(1, 20), 100)
    for _ in range(20):
        proposed(proposer, [DraftRow(before, 30)])
        before.tokens.append(1 + len(before.tokens) * 7 % VOCAB)
    proposer.finished(before)
    cycle = [1, 2, 3, 4, 5, 6, 7] * 6
    one = request("one", cycle, 100)
    for _ in range(21):
        looked.append(any(proposed(proposer, [DraftRow(one, 30)]).drafts))
        one.tokens.append(one.tokens[-7])
    assert not looked[0] and looked[-1], "a gain is found, some tokens late"
    proposer.finished(one)
    assert any(proposed(proposer, [repeating(cycle)]).drafts), "and then at once"
    proposer.finished(before)
    told = request("told", [3, 1, 4], 20)
    told.spec = replace(told.spec, prediction=(1, 5, 9, 2, 6))
    assert any(proposed(proposer, [DraftRow(told, 30)]).drafts)


def test_outputs_of_a_tenant_are_drafts_of_its_later_requests_alone():
    proposer = subject()
    output = [17, 5, 9, 13, 2, 11, 19, 4]
    before = request("before", [1, 2], 20, salt="tenant")
    before.tokens += output
    before.reason = "stop"
    proposer.finished(before)
    for salt, expected in (("tenant", tuple(output[4:])), ("other", ()), ("", ())):
        one = request(f"of {salt}", [8, *output[1:4]], 20, salt=salt)
        assert proposed(proposer, [DraftRow(one, 20)]).drafts == [expected]


def test_a_prediction_is_drafted_from_the_first_token_on():
    driver = Driver(ROOMY, times=memory_bound(), proposer=subject("prediction"))
    one = request("one", [3, 1, 4], 20, ignore_eos=True)
    one.spec = replace(one.spec, prediction=tuple(alone(one, ROOMY)))
    driver.add(one)
    driver.run()
    assert driver.output["one"] == list(one.spec.prediction) and len(driver.plans) <= 4


@pytest.mark.parametrize(("given", "message"), [
    ({"method": "eagle"}, "method must be one of auto, ngram"), ({"method": "draft_model"}, "needs a model"),
    ({"method": ["ngram"]}, "method must be one of"), ({"num_draft": 3}, "there is no key 'num_draft'"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number from 1"),
    ({"method": "ngram", "model": "x"}, "model has no effect with method ngram"),
    ({"model": 3}, "model must be a text"), ({"model": ""}, "needs a model"),
    ({"model": "x", "prompt_lookup_min": 3}, "prompt_lookup_min has no effect with method draft_model"),
    ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min 5 is more"),
    ({"method": "none", "num_speculative_tokens": 3}, "no effect"), ({"prompt_lookup_max": "5"}, "prompt_lookup_max")])
def test_settings_that_say_nothing_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        Speculation.of(given)


@pytest.mark.parametrize("method", METHODS)
def test_auto_is_exact(method):
    given = Speculation(method, model="x" if method == "draft_model" else None)
    exact, other = (given.resolved(is_exact=is_exact).method for is_exact in (True, False))
    assert (exact, other) == (("suffix", "prediction") if method == "auto" else (method, method))
    assert (proposer_of(given.resolved(is_exact=True), StepTimeModel()) is None) == (method == "none")


def test_a_model_alone_names_the_method():
    """As in vLLM."""
    assert Speculation.of({"model": "x"}) == Speculation("draft_model", model="x")

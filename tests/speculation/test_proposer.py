"""The proposer in the scheduler: the tokens are those without it, and it stays within what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import DISCIPLINE, LIMITS, OPERATION, play
from toy import VOCAB, Driver, alone, request

from slotwise.core.drafting import MAX_DRAFTS, NO_GAIN, NO_MATCH
from slotwise.core.interfaces import DraftRow
from slotwise.core.limits import SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.speculation.proposer import DraftProposer, proposer_of
from slotwise.speculation.settings import METHODS, Speculation

ROOMY = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=40)
FREE = Work(9, 9, 0, 0.0, drafts=8)


def memory_bound() -> StepTimeModel:
    """Steps take a second whatever they compute."""
    times = StepTimeModel()
    for _ in range(20):
        times.learn(Work(1, 1, 10, 0.0, longest=10), 1.0)
        times.learn(FREE, 1.0)
    return times


def subject(method: str = "suffix", **given: int) -> DraftProposer:
    return DraftProposer(Speculation(method, **given), memory_bound())


def repeating(prompt: Sequence[int]) -> DraftRow:
    return DraftRow(request("one", prompt, 40), 40)


WORK = Work(1, 1, 12, 0.0)


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
    drafts, _ = proposer.propose(rows, WORK, most)
    assert all(len(found) <= min(limit, number) for found in drafts) and sum(map(len, drafts)) <= most


def test_a_step_says_why_it_has_no_more_drafts():
    cycle = [1, 2, 3, 4, 5, 6, 7] * 6
    assert subject(num_speculative_tokens=2).propose([repeating(cycle)], WORK, 30) == ([(1, 2)], MAX_DRAFTS)
    assert subject().propose([repeating(range(1, 20))], WORK, 30) == ([()], NO_MATCH)
    busy = StepTimeModel()
    for rows in (1, 2, 4, 8, 16, 32) * 20:
        busy.learn(Work(rows, rows, 0, 0.0, longest=10), float(rows))
        busy.learn(Work(rows, rows, 0, 0.0, drafts=1), float(rows))
    assert DraftProposer(Speculation("ngram"), busy).propose([repeating(cycle)], WORK, 30) == ([()], NO_GAIN)


def test_a_row_whose_drafts_are_wrong_is_looked_at_less_often_and_is_found_again():
    """Continuations disagree for 400 tokens, and are a cycle from then on: unverified guesses tell both."""
    times, noise, drafted = memory_bound(), Random(1), []
    for number in (1, 2, 4, 8, 16) * 20:
        times.learn(Work(1 + number, 1 + number, 0, 0.0, drafts=number), 1 + number / 10)
    proposer, one = DraftProposer(Speculation("suffix"), times), request("one", [1, 2, 3, 4], 1000)
    for at in range(600):
        (drafts,), _ = proposer.propose([DraftRow(one, 30)], WORK, 30)
        drafted.append(len(drafts))
        one.tokens.append(noise.randrange(VOCAB) if at < 400 else 1 + at % 5)
        proposer.committed([one], [drafts])
    assert sum(map(bool, drafted[200:400])) < 20, "there is nothing to gain"
    assert sum(map(bool, drafted[450:])) > 130, "and then there is"


def test_a_request_after_one_without_a_gain_is_looked_at_later_unless_it_has_a_prediction():
    proposer, looked = subject(), []
    before = request("before", range(1, 20), 100)
    for _ in range(20):
        proposer.propose([DraftRow(before, 30)], WORK, 30)
        before.tokens.append(1 + len(before.tokens) * 7 % VOCAB)
    proposer.finished(before)
    cycle = [1, 2, 3, 4, 5, 6, 7] * 6
    one = request("one", cycle, 100)
    for _ in range(21):
        looked.append(any(proposer.propose([DraftRow(one, 30)], WORK, 30).drafts))
        one.tokens.append(one.tokens[-7])
    assert not looked[0] and looked[-1], "a gain is found, some tokens late"
    proposer.finished(one)
    assert any(proposer.propose([repeating(cycle)], WORK, 30).drafts), "and then at once"
    proposer.finished(before)
    told = request("told", [3, 1, 4], 20)
    told.prediction = (1, 5, 9, 2, 6)
    assert any(proposer.propose([DraftRow(told, 30)], WORK, 30).drafts)


def test_outputs_of_a_tenant_are_drafts_of_its_later_requests_alone():
    proposer = subject()
    output = [17, 5, 9, 13, 2, 11, 19, 4]
    before = request("before", [1, 2], 20, salt="tenant")
    before.tokens += output
    before.reason = "stop"
    proposer.finished(before)
    proposer.committed([], [])
    for salt, expected in (("tenant", tuple(output[4:])), ("other", ()), ("", ())):
        one = request(f"of {salt}", [8, *output[1:4]], 20, salt=salt)
        assert proposer.propose([DraftRow(one, 20)], WORK, 20).drafts == [expected]


def test_a_prediction_is_drafted_from_the_first_token_on():
    driver = Driver(ROOMY, times=memory_bound(), proposer=subject("prediction"))
    one = request("one", [3, 1, 4], 20, ignore_eos=True)
    one.prediction = tuple(alone(one, ROOMY))
    driver.add(one)
    driver.run()
    assert driver.output["one"] == list(one.prediction) and len(driver.plans) <= 4


@pytest.mark.parametrize(("given", "message"), [
    ({"method": "eagle"}, "method must be one of auto, ngram"), ({"method": "draft_model"}, "needs a model"),
    ({"method": ["ngram"]}, "method must be one of"), ({"num_draft": 3}, "there is no key 'num_draft'"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number from 1"),
    ({"method": "ngram", "model": "x"}, "model has no effect with method ngram"), ({"model": 3}, "needs a model"),
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

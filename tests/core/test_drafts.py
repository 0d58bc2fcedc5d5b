"""Rows with drafts: the output is that without, whatever is guessed, and nothing of a wrong guess stays behind."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import DISCIPLINE, LIMITS, OPERATION, play
from support.toy import VOCAB, Driver, Guesses, Placeholders, Proposing, alone, next_token, request

from slotwise.core.chunking import AIM
from slotwise.core.drafting import MAX_STEP_DRAFTS
from slotwise.core.params import SamplingSpec
from slotwise.core.reasons import TOKEN_BUDGET, VERIFYING
from slotwise.core.record import CACHE_GROUP, PROPOSED, FreedBlocks, RowKind, StepPlan, StepResult
from slotwise.core.request import Output, Request, RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import StepTimeModel, Work

ROOMY = SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


class Fixed(Proposing):
    """Proposes as many right tokens, then as many wrong ones."""

    def __init__(self, num_right: int, num_wrong: int = 0) -> None:
        self.num_right, self.num_wrong = num_right, num_wrong

    def guess(self, request: Request, most: int) -> list[int]:
        known = list(request.tokens)
        for number in range(self.num_right + self.num_wrong):
            token = next_token(known)
            known.append(token if number < self.num_right else (token + 1) % VOCAB)
        return known[len(request.tokens):][:most]

def lasting(name: str, num_prompt: int = 3, max_tokens: int = 12) -> Request:
    return request(name, [1 + number % 7 for number in range(num_prompt)], max_tokens, ignore_eos=True)


def decoding(proposer: Fixed, limits: SchedulerLimits = ROOMY, **asked: int) -> Driver:
    """A driver whose only request is past its prompt."""
    driver = Driver(limits, proposer=proposer)
    driver.add(lasting("one", **asked))
    driver.plan(), driver.commit()
    return driver


@settings(max_examples=150, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=60), st.integers(0, 2**32 - 1),
       st.sampled_from((Guesses, Placeholders)))
def test_tokens_are_those_without_drafts_and_every_request_ends_once(limits, discipline, operations, seed, proposer):
    """The driver checks blocks, slots and the token budget after each call, and that the run comes to an end."""
    driver, expected = play(limits, discipline, operations, proposer(seed))
    assert driver.ended.keys() == expected.keys()
    for name, reason in driver.ended.items():
        got = driver.output.get(name, [])
        assert got == expected[name] if reason in ("stop", "length") else got == expected[name][: len(got)]
    assert driver.scheduler.num_free_blocks == limits.num_blocks


@settings(max_examples=80, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=40), st.integers(0, 2**32 - 1),
       st.sampled_from((Guesses, Placeholders)))
def test_the_same_calls_give_the_same_plans(limits, discipline, operations, seed, proposer):
    first, second = (play(limits, discipline, operations, proposer(seed))[0] for _ in range(2))
    assert first.plans == second.plans


def verified(plan: StepPlan) -> set[str]:
    return {name for name, drafted in zip(plan.request_ids, plan.drafts, strict=False) if drafted}


def assert_rows(plan: StepPlan, previous: StepPlan | None) -> None:
    drafts = plan.drafts or ((),) * plan.num_rows
    for kind, count, wanted, drafted in zip(plan.kinds, plan.counts, plan.num_logits, drafts, strict=True):
        if kind is RowKind.DECODE:
            assert count == wanted == 1 + len(drafted)
        else:
            assert not drafted and wanted in (0, 1)
    if previous is not None:
        assert verified(previous).isdisjoint(plan.request_ids), "how far they got is not known"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(5, 30))
def test_rows_say_what_they_are_and_wait_while_they_are_verified(seed, blocks):
    driver, draw = Driver(replace(ROOMY, num_blocks=blocks), proposer=Guesses(seed)), Random(seed)
    for number in range(8):
        driver.add(lasting(f"r{number}", draw.randint(1, 12), draw.randint(1, 8)))
    while driver.scheduler.num_unfinished:
        plan = driver.plan()
        assert_rows(plan, driver.flying[-2] if len(driver.flying) > 1 else None)
        preempted = {name for name, _, _ in plan.preempted}
        for name in verified(driver.flying[0]) if len(driver.flying) > 1 else ():
            assert name in preempted or dict(plan.refused)[name] == VERIFYING
        if len(driver.flying) > 1 or draw.random() < 0.5:
            driver.commit()
    assert len(driver.ended) == 8


def test_a_row_leaves_out_a_step_to_draft_from_its_token_in_flight_if_the_proposer_says_so():
    driver = Driver(ROOMY, proposer=Fixed(2))
    driver.add(lasting("one"))
    driver.plan()
    assert driver.plan().refused == (("one", VERIFYING),)
    driver.commit(), driver.commit()
    assert len(driver.plan().drafts[0]) == 2
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


@pytest.mark.parametrize(("right", "wrong"), [(0, 3), (1, 2), (3, 0), (2, 9)])
def test_a_step_yields_the_drafts_that_are_right_and_one_token_more(right, wrong):
    driver = decoding(Fixed(right, wrong))
    plan = driver.plan()
    assert len(plan.drafts[0]) == min(right + wrong, 10) == plan.counts[0] - 1 and plan.num_logits == plan.counts
    driver.commit()
    assert len(driver.output["one"]) == 1 + right + 1
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


def test_blocks_behind_the_accepted_tokens_are_freed():
    driver = decoding(Fixed(0, 9), num_prompt=4)
    free = driver.scheduler.num_free_blocks
    plan = driver.plan()
    assert sum(len(blocks) for _, _, blocks in plan.new_blocks) == 3, "positions 4 to 13"
    driver.commit()
    assert driver.scheduler.num_free_blocks == free - 1, "position 4 is the token sampled last"
    assert driver.plan().freed_blocks == (FreedBlocks(0, CACHE_GROUP, 2),)


def test_what_was_allocated_on_admission_stays():
    from slotwise.core.disciplines.disciplines import Orca

    driver = Driver(ROOMY, Orca(), proposer=Fixed(0, 9))
    driver.add(lasting("one"))
    driver.run()
    assert not any(plan.freed_blocks for plan in driver.plans) and any(plan.drafts for plan in driver.plans)


def test_freed_blocks_of_a_slot_that_was_released_are_not_told():
    driver = decoding(Fixed(0, 9), num_prompt=4)
    driver.plan(), driver.commit()
    driver.finish("one")
    driver.add(lasting("two"))
    plan = driver.plan()
    assert plan.released_slots == (0,) and not plan.freed_blocks and plan.new_requests[0].slot == 0


@pytest.mark.parametrize(("blocks", "counts"), [(3, (4,)), (4, (4, 4)), (5, (4, 4)), (64, (7, 1))])
def test_drafts_have_the_tokens_that_all_rows_leave_and_a_block_for_each_row_stays_free(blocks, counts):
    """Each of the two has a full block, so it needs another one in any case: with three, one of them is preempted.

    The block that it gets then has room for three drafts.
    """
    limits = replace(ROOMY, num_blocks=blocks, max_num_seqs=2, max_num_batched_tokens=8)
    driver = Driver(limits, proposer=Fixed(9))
    for name in ("one", "two"):
        driver.add(lasting(name, 4, 9))
    driver.plan(), driver.commit()
    plan = driver.plan()
    assert plan.counts == counts and len(plan.preempted) == (len(counts) < 2)
    driver.run()
    assert driver.ended == {"one": "length", "two": "length"}


def test_a_row_preempted_while_it_is_verified_keeps_what_was_accepted():
    driver = decoding(Fixed(2))
    driver.plan()
    (one,) = driver.scheduler.requests()
    driver.scheduler._preempt(one, driver.now)
    assert "one" not in driver.plan().request_ids
    driver.commit()
    assert len(driver.output["one"]) == 4
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


def test_a_failed_step_takes_its_drafts_back():
    driver = decoding(Fixed(2))
    driver.plan()
    assert driver.scheduler.rollback() == ["one"]
    driver.flying.clear(), driver.executor.collect()
    driver.scheduler.check()
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


@pytest.mark.parametrize("tokens", [((99, 98),), ((1, 2, 3, 4, 5, 6, 7),)])
def test_a_result_that_its_drafts_do_not_begin_is_refused(tokens):
    driver = decoding(Fixed(2))
    plan = driver.plan()
    with pytest.raises(RuntimeError, match="do not start with"):
        driver.scheduler.commit(plan, StepResult(plan.step, tokens), 9.0)


class Unnamed(Placeholders):
    """Leaves two drafts to an executor that proposes `num_named`, all of them right."""

    def __init__(self, num_named: int) -> None:
        super().__init__(0)
        self.num_named = num_named

    def guess(self, request: Request, most: int) -> list[int]:
        return [PROPOSED] * min(2, most)

    def named(self, known: list[int], most: int) -> list[int]:
        tokens = list(known)
        for _ in range(min(most, self.num_named)):
            tokens.append(next_token(tokens))
        return tokens[len(known):]


@pytest.mark.parametrize("num_named", [0, 1, 2])
def test_a_step_yields_the_drafts_that_the_executor_names_and_one_token_more(num_named):
    """What was scheduled beyond is taken back."""
    driver = decoding(Unnamed(num_named))
    plan = driver.plan()
    assert plan.drafts == ((PROPOSED, PROPOSED),) and plan.counts == plan.num_logits == (3,) and plan.has_proposed
    (one,) = driver.scheduler.requests()
    driver.commit()
    assert len(driver.output["one"]) == 1 + num_named + 1
    assert one.num_scheduled == one.num_computed == len(one.tokens) - 1 and not one.pending
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


@pytest.mark.parametrize(("named", "message"), [
    (((1, 2, 3),), "names drafts"), (((PROPOSED,),), "names drafts"), (((1,), (2,)), "drafts of 2 rows"),
    (((7,),), "do not start with")])
def test_drafts_that_a_result_cannot_name_are_refused(named, message):
    driver = decoding(Unnamed(2))
    plan = driver.plan()
    with pytest.raises(RuntimeError, match=message):
        driver.scheduler.commit(plan, StepResult(plan.step, ((1, 2),), drafts=named), 9.0)


def test_all_positions_of_a_prompt_want_logits_and_none_is_found_in_the_cache():
    limits = replace(ROOMY, enable_prefix_caching=True, max_num_batched_tokens=8)
    driver = Driver(limits)
    driver.add(lasting("before", 12, 1))
    driver.run()

    class Ignores:
        """The fake executor computes no log-probabilities of prompts."""

        def submit(self, plan: StepPlan) -> None:
            self.plan = plan

        def collect(self) -> StepResult:
            ends = [start + count for start, count in zip(self.plan.starts, self.plan.counts, strict=True)]
            return StepResult(self.plan.step, tuple([(5,) if end >= 12 else () for end in ends]))

    driver.executor = Ignores()
    params = SamplingSpec(max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    driver.add(Request("scored", RequestSpec([1 + number % 7 for number in range(12)], params)))
    driver.run()
    scored = [plan for plan in driver.plans if "scored" in plan.request_ids]
    assert scored[0].new_requests[0].spec.output is Output.PROMPT_LOGPROBS
    assert [(plan.starts, plan.counts, plan.num_logits) for plan in scored] == [
        ((0,), (8,), (8,)), ((8,), (4,), (4,)), ((12,), (1,), (1,)), ((13,), (1,), (1,))]


def test_drafts_are_the_first_that_a_step_without_tokens_to_spare_goes_without():
    driver = decoding(Fixed(9), replace(ROOMY, max_num_batched_tokens=8))
    driver.add(lasting("long", 20, 1))
    plan = driver.plan()
    assert plan.counts == (1, 7) and not plan.drafts and plan.draft_limit == TOKEN_BUDGET
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


def test_drafts_stay_within_the_time_of_the_step():
    """Each token takes a second: with four of them a step has time for three drafts."""
    times = StepTimeModel()
    for tokens in range(1, 9):
        for _ in range(20):
            times.learn(Work(tokens, tokens, 0, 0.0, drafts=tokens - 1), float(tokens))
    driver = Driver(replace(ROOMY, max_step_ms=4.5 / AIM * 1000), times=times, proposer=Fixed(9))
    driver.add(lasting("one"))
    driver.plan(), driver.commit()
    plan = driver.plan()
    assert 2 <= plan.counts[0] <= 5
    driver.run()
    assert driver.output["one"] == alone(lasting("one"), ROOMY)


def test_a_step_has_a_bounded_number_of_drafts():
    """Each has a row of logits in memory."""
    limits = SchedulerLimits(
        max_model_len=500, num_blocks=500, block_size=4, max_num_seqs=4, max_num_batched_tokens=400)
    driver = Driver(limits, proposer=Fixed(100))
    for name in ("one", "two"):
        driver.add(lasting(name, max_tokens=300))
    driver.plan(), driver.commit()
    plan = driver.plan()
    assert [len(drafts) for drafts in plan.drafts] == [100, MAX_STEP_DRAFTS - 100]

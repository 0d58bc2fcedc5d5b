"""Steps budgeted in time: what is predicted stays within the budget, and long prompts come to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, Comer, Priced, crowd, play
from support.toy import Driver, alone, request

from slotwise.core.chunking import FLOOR
from slotwise.core.disciplines.disciplines import Chunked, Inline
from slotwise.core.reasons import TIME_BUDGET
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SLO, SchedulerLimits, Tier
from slotwise.core.step_budget import EVEN, MOST, StepBudget, stall_limit
from slotwise.core.step_time import StepTimeModel, Work, work_of

LONG = replace(ROOMY, max_model_len=400, num_blocks=800, max_num_seqs=8, max_num_batched_tokens=256)
ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 250), st.integers(1, 9)), min_size=1, max_size=12)


class Kinked(Priced):
    """Where a step of more tokens may be predicted to take less, as corrections by size do."""

    def seconds(self, work: Work) -> float:
        return super().seconds(work) * (3.0 if 16 <= work.tokens < 64 else 1.0)


def taught() -> StepTimeModel:
    times, known = StepTimeModel(), Priced()
    for round_ in range(300):
        start, count = round_ * 37 % 350, 1 + round_ * 53 % 200
        for work in (work_of([start], [count]), work_of([start] * 4, [1] * 4), work_of([start, 9], [1, count])):
            times.learn(work, known.seconds(work))
    return times


def assert_within(plan: StepPlan, times: StepTimeModel, seconds: float) -> None:
    """But for steps of decoding rows alone, and the least that a prompt gets."""
    pieces = [count for count in plan.counts if count > 1]
    took = times.seconds(work_of(plan.starts, plan.counts))
    assert took <= seconds or not pieces or (len(pieces) == 1 and pieces[0] <= FLOOR)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from((5.0, 20.0, 40.0, 100.0)), ROWS, st.integers(0, 40))
def test_no_step_is_predicted_to_take_longer_than_it_may(budget, rows, longest):
    limits, times = replace(LONG, max_step_ms=budget), Priced()
    people = crowd([Comer(*each) for each in rows])
    driver = Driver(limits, Chunked(longest), times=times)
    play(driver, people, lambda driver, plan: assert_within(plan, times, budget / 1000))
    assert driver.output == {one.request_id: alone(one, limits) for _, one in people}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from((30.0, 60.0, 120.0)), ROWS)
@example(60.0, [(0, 10, 9), (0, 100, 9), (0, 100, 9)])
def test_every_row_gets_a_token_where_more_tokens_are_predicted_to_take_less(budget, rows):
    limits = replace(LONG, max_step_ms=budget, max_num_batched_tokens=100)
    people = crowd([Comer(*each) for each in rows])

    def look(driver, plan):
        assert all(count >= 1 for count in plan.counts)

    driver = Driver(limits, times=Kinked())
    play(driver, people, look)
    assert driver.output == {one.request_id: alone(one, limits) for _, one in people}


def test_a_learned_model_holds_the_budget_too():
    times, known = taught(), Priced()
    limits = replace(LONG, max_step_ms=60.0)
    within = []

    def look(driver, plan):
        if len(plan.counts) > 1 and max(plan.counts) > FLOOR:
            within.append(known.seconds(work_of(plan.starts, plan.counts)) <= 0.060 * 1.25)

    driver = Driver(limits, times=times)
    times.step = lambda *told: None  # the driver's clock runs in seconds
    play(driver, crowd([Comer(0, 10, 60)] * 3 + [Comer(2, 250, 4)] * 6), look)
    assert len(within) > 10 and sum(within) >= 0.99 * len(within)


def test_the_closest_pace_promised_to_one_who_runs_governs():
    times, pieces = Priced(), {}

    def look(driver, plan):
        for name, count in zip(plan.request_ids, plan.counts, strict=True):
            if count > 1 and name == "r1":
                pieces.setdefault(driver.scheduler.num_running, []).append(count)
        if "r0" not in driver.ended:
            assert_within(plan, times, 0.050)

    driver = Driver(LONG, times=times)
    play(driver, crowd([Comer(0, 4, 12, SLO(tpot=0.050)), Comer(1, 300, 2), Comer(0, 300, 2)]), look)
    assert max(pieces[3] if 3 in pieces else pieces[2]) < 60
    free = Driver(LONG, times=times)
    play(free, crowd([Comer(0, 4, 12), Comer(1, 300, 2), Comer(0, 300, 2)]))
    assert len(free.plans) < len(driver.plans)


@pytest.mark.parametrize("tier", ["", "gold"])
def test_only_an_objective_of_a_tier_keeps_others_from_starting(tier):
    driver = Driver(replace(LONG, tiers=(Tier("gold"),)), times=Priced())
    driver.add(request("first", [1, 2, 3], 300, slo=SLO(tier=tier, tpot=0.0001), ignore_eos=True))
    for _ in range(2):
        driver.plan()
        driver.commit()
    driver.add(request("second", [4, 5, 6], 2))
    plan = driver.plan()
    assert ("second" in driver.admitted) == (not tier)
    assert [decision.reason for decision in plan.refused] == ([TIME_BUDGET] if tier else [])
    driver.commit()
    driver.run()


def test_an_objective_that_no_step_can_keep_leaves_prompts_half_of_each():
    def num_steps(tpot):
        driver = Driver(LONG, times=Slow())
        driver.add(request("first", [1, 2, 3], 380, slo=SLO(tpot=tpot), ignore_eos=True))
        for _ in range(2):
            driver.plan()
            driver.commit()
        for number in range(4):
            driver.add(request(f"r{number}", [4 + number] * 200, 2, ignore_eos=True))
        steps = 0
        while not all(f"r{number}" in driver.ended for number in range(4)):
            driver.plan()
            driver.commit()
            steps += 1
        return steps

    class Slow(Priced):
        def seconds(self, work: Work) -> float:
            return super().seconds(work) + 0.050

    assert num_steps(0.0001) < 40 < 4 * 200 / FLOOR


def test_who_finds_no_time_is_told_so():
    driver = Driver(replace(LONG, max_step_ms=30.0), times=Priced())
    told = set()
    play(driver, crowd([Comer(0, 4, 30), Comer(0, 4, 30), Comer(1, 200, 2), Comer(0, 200, 2)]),
         lambda driver, plan: told.update(plan.refused))
    assert any(decision.reason == TIME_BUDGET for decision in told)
    assert len(driver.ended) == 4


@given(st.floats(0.001, 1.0), st.integers(0, 500), st.integers(1, 500))
def test_what_fits_is_the_most_that_fits(seconds, start, wanted):
    fits = StepBudget(Priced(), seconds).fitting(start, wanted)
    assert 0 <= fits <= wanted
    for count, is_within in ((fits, True), (fits + 1, False)):
        if 0 < count <= wanted:
            assert (Priced().seconds(work_of([start], [count])) <= seconds) == is_within


def test_while_nothing_is_known_nothing_is_held_back():
    assert StepBudget(StepTimeModel(), 0.001).fitting(0, 500) == 500


@pytest.mark.parametrize("name", ["max_step_ms", "max_stall_ms"])
@pytest.mark.parametrize("wrong", [0, -1.0, 1e9])
def test_a_limit_must_be_a_time(name, wrong):
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(max_model_len=10, num_blocks=10, block_size=1, max_num_seqs=1, **{name: wrong})


def steps_with_prompts(people, discipline, times=None, **limits):
    """Rows that decode and seconds, of each step that computes a prompt."""
    steps, times = [], times or Priced()

    def look(driver, plan):
        if max(plan.counts, default=0) > 1:
            steps.append((plan.counts.count(1), times.seconds(work_of(plan.starts, plan.counts))))

    driver = Driver(replace(LONG, **limits), discipline, times=times)
    play(driver, people, look)
    assert len(driver.ended) == len(people)
    return steps


GIANTS = [Comer(0, 2, 100), Comer(0, 2, 100), Comer(0, 2, 100), Comer(0, 2, 100), Comer(4, 380, 2), Comer(0, 380, 2)]


def test_prompts_hold_up_those_who_decode_no_longer_than_they_may():
    steps = [seconds for decoding, seconds in steps_with_prompts(crowd(GIANTS), Chunked(), max_stall_ms=60.0)
             if decoding >= 2]
    assert len(steps) >= 10 and max(steps) <= 0.060
    assert max(seconds for _, seconds in steps_with_prompts(crowd(GIANTS), Chunked())) > 0.250


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.001, 0.5))
def test_a_stall_limit_is_what_a_late_first_token_and_a_gap_cost_least_at(num_decoding, num_newcomers, bound):
    decode = Priced().seconds(Work(num_decoding, num_decoding, 0, 0.0))
    free = max(bound, 2 * decode)
    limit = stall_limit(Priced(), bound, [-1] * num_decoding, num_newcomers)

    def cost(seconds):
        waits = max(0, num_newcomers - num_decoding / 2) / 2 * decode
        return (waits + num_decoding * seconds**2 / (EVEN * bound)) / (seconds - decode)

    most = max(MOST * bound, free)
    assert free <= limit.seconds <= most and limit.free == free
    assert limit.seconds == free or num_newcomers > num_decoding / 2
    others = [free + (most - free) * share / 50 for share in range(51)]
    assert cost(limit.seconds) <= min(map(cost, others)) * (1 + 1e-9)


def test_a_step_takes_longer_where_more_than_half_as_many_begin_as_decode_and_at_most_four_limits():
    def first(num_newcomers: int) -> float:
        """Seconds of the first step with a prompt beside two who decode."""
        burst = [*[Comer(0, 2, 60)] * 2, *[Comer(3 * (number == 0), 300, 4) for number in range(num_newcomers)]]
        decoding, seconds = steps_with_prompts(crowd(burst), Chunked(), max_stall_ms=50.0)[1]
        assert decoding == 2
        return seconds

    one, two, six = map(first, (1, 2, 6))
    assert one <= 0.050 < two < six <= 0.180 < six + 0.002


def test_those_who_decode_never_leave_prompts_less_time_than_they_take_themselves():
    class Crowded(Priced):
        def seconds(self, work: Work) -> float:
            return super().seconds(work) + 0.010 * work.rows

    many = [*[Comer(0, 2, 200)] * 7, Comer(1, 300, 2)]
    six = Crowded().seconds(work_of([3] * 6, [1] * 6))  # one of them stops at once
    steps = [seconds for decoding, seconds in steps_with_prompts(crowd(many), Chunked(), Crowded(), max_stall_ms=1.0)
             if decoding == 6]
    assert len(steps) >= 5 and 1.5 * six < max(steps) <= 2.05 * six


def test_a_short_prompt_is_not_cut_where_that_is_over_soon():
    streams = [Comer(0, 2, 60), Comer(0, 2, 60)]
    for prompt, steps in ((80, 1), (140, 5)):  # 92 and 153 milliseconds whole
        few = steps_with_prompts(crowd([*streams, Comer(3, prompt, 4)]), Chunked(), max_stall_ms=50.0)
        assert len(few) == 1 + steps, "one for the streams' own prompts"
    within = steps_with_prompts(crowd([*streams, Comer(3, 80, 4)]), Chunked(), max_stall_ms=50.0, max_step_ms=50.0)
    assert len(within) == 1 + 3, "a limit that was asked for has no exceptions"


@pytest.mark.parametrize("asked", [None, 5_000.0])
def test_whoever_waits_begins_though_the_least_it_gets_takes_longer(asked):
    class Slow(Priced):
        def seconds(self, work: Work) -> float:
            return super().seconds(work) + 0.1 * max(0, work.tokens - work.rows)

    begun = {}

    def look(driver, plan):
        begun.update((join.request_id, driver.now) for join in plan.new_requests)

    driver = Driver(replace(LONG, max_stall_ms=1.0, max_step_ms=asked), times=Slow())
    play(driver, crowd([Comer(0, 2, 100), Comer(0, 2, 100), Comer(3, 60, 2), Comer(0, 60, 2)]), look)
    assert begun["r2"] == 3.0 and len(driver.ended["r0"]) and begun["r3"] < 9.0


def test_who_computes_prompts_whole_holds_nobody_back():
    assert (steps_with_prompts(crowd(GIANTS), Inline(), max_stall_ms=20.0)
            == steps_with_prompts(crowd(GIANTS), Inline()))

"""What each policy promises, with a cache that is too small: bounds, no inversion, shares, objectives."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import (
    ROOMY,
    TIGHT,
    Comer,
    KnownTimes,
    Starts,
    assert_right,
    comers,
    crowd,
    play,
    running,
    slo,
    waiting,
)
from support.toy import alone

from slotwise.core.interfaces import Policy
from slotwise.core.policies.deadline import Deadline
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.policies.priority import Priority
from slotwise.core.policies.program import LEVELS, LeastServedProgram
from slotwise.core.policies.shortest import ENOUGH, KEPT, MAX_KINDS, PROMPT_SHARE, Guesses, Shortest
from slotwise.core.reasons import NO_SLOT, OUTRANKED
from slotwise.core.request import Request, State
from slotwise.core.scheduler_limits import SLO

SECONDS = st.sampled_from((1.0, 4.0, 30.0))
bounded = settings(max_examples=25, deadline=None)


# -- priority ----------------------------------------------------------------------------------------------------


@bounded
@given(SECONDS, st.integers(1, 3), comers(slo(priorities=(-2, 0, 1, 4))))
def test_waiting_makes_up_for_any_priority(ageing, gap, coming):
    driver = Starts(Priority(ageing, gap))
    play(driver, crowd(coming))
    assert_right(driver)
    for went, left in driver.passed:
        later = went.arrived_at - left.arrived_at
        assert later <= ageing * (left.spec.slo.priority - went.spec.slo.priority)


@bounded
@given(SECONDS, st.integers(1, 3), comers(slo(priorities=(-2, 0, 1, 4)), max_prompt=6, max_output=9))
def test_nobody_waits_for_a_slot_that_one_behind_it_has(ageing, gap, coming):
    def look(driver, plan):
        outranked = sum(decision.reason == OUTRANKED for decision in plan.preempted)
        if plan.stop is None or plan.stop.reason != NO_SLOT or outranked >= 4:
            return
        first = next(one for one in waiting(driver) if one.request_id == plan.stop.first_blocked)
        for one in running(driver):
            is_ahead = one.spec.slo.priority - first.spec.slo.priority >= gap
            earlier = first.arrived_at - one.arrived_at
            assert not (is_ahead and earlier < ageing * (one.spec.slo.priority - first.spec.slo.priority))

    driver = Starts(Priority(ageing, gap), replace(TIGHT, num_blocks=30))
    play(driver, crowd(coming), look)
    assert_right(driver)


def test_who_had_to_give_way_comes_back_and_ends():
    low = [Comer(0, 4, 20, SLO(priority=5))] * 4
    high = [Comer(1, 4, 6, SLO(priority=0))] * 12
    driver = Starts(Priority(60.0, 1))
    play(driver, crowd(low + high))
    assert {"r0", "r1", "r2", "r3"} & set(driver.preempted)
    assert_right(driver)


@given(st.builds(SLO, priority=st.integers(-9, 9)), st.builds(SLO, priority=st.integers(-9, 9)),
       st.floats(0, 100), st.floats(0, 100), SECONDS, st.integers(1, 9))
def test_only_who_goes_before_takes_a_place(terms_a, terms_b, came_a, came_b, ageing, gap):
    policy = Priority(ageing, gap)
    one, other = (crowd([Comer(0, 1, 1, slo)])[0][1] for slo in (terms_a, terms_b))
    one.arrived_at, other.arrived_at = came_a, came_b
    if policy.preempts(one, other, 100.0):
        assert policy.waiting_key(one, 100.0) < policy.running_key(other, 100.0)
        assert not policy.preempts(other, one, 100.0)


# -- shortest ----------------------------------------------------------------------------------------------------


@bounded
@given(SECONDS, st.booleans(), comers(slo(tenants=("a", "b")), max_size=40))
def test_nobody_is_passed_by_those_who_come_later_than_its_work_is_worth(ageing, oracle, coming):
    people = crowd(coming)
    for _, one in people:
        one.spec = replace(one.spec, forced_length=len(alone(one, TIGHT)))
    driver = Starts(Shortest(ageing, 0.5, oracle=oracle))
    play(driver, people)
    assert_right(driver)
    for went, left in driver.passed:
        work = left.num_prompt * PROMPT_SHARE + left.spec.params.max_tokens
        assert went.arrived_at - left.arrived_at <= work / ageing
    if not oracle:
        assert driver.output == output_of(FirstComeFirstServed(), coming)


def output_of(policy: Policy, coming: list[Comer]) -> dict[str, list[int]]:
    driver = Starts(policy)
    play(driver, crowd(coming))
    return driver.output


def test_a_guess_is_of_ones_own_kind_where_enough_is_known():
    guesses = Guesses(0.5)
    assert guesses.guess("a", 10, 0) is None
    for _ in range(ENOUGH):
        guesses.learn("a", 10, 5)
        guesses.learn("b", 10, 50)
        guesses.learn("b", 1000, 500)
    assert guesses.guess("a", 10, 0) == guesses.guess("a", 11, 0) == 5
    assert guesses.guess("b", 10, 0) == 50 and guesses.guess("b", 1000, 0) == 500
    assert guesses.guess("c", 1000, 0) == 500, "of all tenants' prompts as long"
    assert guesses.guess("a", 90_000, 0) == 5, "of its own prompts of any length"
    assert guesses.guess("a", 10, 5) == 5, "nobody was longer than what is there"
    assert guesses.guess("b", 10, 49) == 50


def test_prompts_of_about_the_same_length_are_told_apart_once_enough_is_known_of_each():
    guesses = Guesses(0.5)
    for number in range(ENOUGH):
        guesses.learn("a", 100, 7)
        if number:
            guesses.learn("a", 120, 70)
    assert guesses.guess("a", 100, 0) == guesses.guess("a", 111, 0) == 7
    assert guesses.guess("a", 120, 0) == 7, "of both, while little is known of its own"
    guesses.learn("a", 120, 70)
    assert guesses.guess("a", 120, 0) == guesses.guess("a", 127, 0) == 70


def test_what_is_kept_of_lengths_is_bounded():
    guesses = Guesses(0.5)
    for number in range(2 * MAX_KINDS):
        guesses.learn(f"tenant {number}", 1 + number, 7)
    assert len(guesses._kinds) <= MAX_KINDS
    for _ in range(2 * KEPT):
        guesses.learn("", 1, 9)
    assert all(len(lengths) <= KEPT for lengths in guesses._kinds.values())
    assert guesses.guess("", 1, 0) == 9, "old lengths are forgotten"


# -- deadline ----------------------------------------------------------------------------------------------------


def latest_start(one: Request, default: float) -> float:
    return one.arrived_at + (one.spec.slo.ttft or default) - KnownTimes.TOKEN * one.num_prompt


@bounded
@given(SECONDS, SECONDS, comers(slo(ttfts=(None, 1.0, 6.0, 25.0))))
def test_nobody_who_is_late_waits_for_ever(ttft, ageing, coming):
    driver = Starts(Deadline(KnownTimes(), ttft, ageing, sheds=False))
    play(driver, crowd(coming))
    assert_right(driver)
    for went, left in driver.passed:
        assert went.arrived_at - left.arrived_at <= max(ageing, left.spec.slo.ttft or ttft)


@bounded
@given(SECONDS, comers(slo(ttfts=(None, 1.0, 6.0, 25.0)), max_prompt=8))
def test_only_who_can_no_longer_be_in_time_is_shed_and_only_before_it_started(ttft, coming):
    driver = Starts(Deadline(KnownTimes(), ttft, 5.0, sheds=True))

    def look(driver, plan):
        for one in waiting(driver):
            if one.state is State.WAITING:
                assert driver.now < latest_start(one, ttft), "whoever is late has been told"

    play(driver, crowd(coming), look)
    assert_right(driver)
    for name, reason in driver.ended.items():
        if reason == "shed":
            assert driver.output.get(name, []) == [] and name not in driver.admitted
        else:
            assert name in driver.admitted
    assert not any(reason == "shed" and driver.now < latest_start(driver.everyone[name], ttft)
                   for name, reason in driver.ended.items())


def test_one_that_yielded_before_its_first_token_is_aged_as_well():
    """Preempted, late, and without a token: those who come later and can be in time do not pass it for ever."""
    policy = Deadline(KnownTimes(), 5.0, 8.0, sheds=False)
    driver = Starts(policy, replace(TIGHT, num_blocks=9, max_num_seqs=2))
    one = crowd([Comer(0, 30, 4)])[0][1]
    driver.add(one)
    driver.plan(), driver.commit()
    driver.scheduler._preempt(one, driver.now)
    for number in range(30):
        later = crowd([Comer(0, 3, 4)])[0][1]
        later.request_id = f"later {number}"
        driver.add(later)
        driver.plan(), driver.commit()
    driver.run()
    after = [name for name in driver.admitted if name.startswith("later")]
    assert driver.admitted[1:].index("r0") < len(after) / 2
    assert_right(driver)


def test_late_ones_step_back():
    late, soon = SLO(ttft=0.5), SLO(ttft=20.0)
    driver = Starts(Deadline(KnownTimes(), 9.0, 60.0, sheds=False), replace(ROOMY, max_num_seqs=1))
    play(driver, crowd([Comer(0, 1, 5), Comer(0, 4, 5, late), Comer(0, 4, 5, soon)]))
    assert driver.admitted == ["r0", "r2", "r1"]


# -- program -----------------------------------------------------------------------------------------------------


@bounded
@given(SECONDS, comers(slo(tenants=("a", "b")), max_size=40, sessions=("", "x", "y")))
def test_no_request_is_passed_by_one_that_arrives_later_than_its_levels_are_worth(ageing, coming):
    policy = LeastServedProgram(ageing, quantum=5.0)
    levels: dict[str, int] = {}

    class Levels(Starts):
        def add(self, new: Request) -> None:
            super().add(new)
            levels[new.request_id] = policy._levels[new.request_id]

    driver = Levels(policy)
    play(driver, crowd(coming))
    assert_right(driver)
    for went, left in driver.passed:
        assert went.arrived_at - left.arrived_at <= ageing * (levels[left.request_id] - levels[went.request_id])
    assert max(levels.values()) <= LEVELS and not policy._levels
    assert driver.output == output_of(FirstComeFirstServed(), coming)


def test_service_of_long_ago_counts_less_and_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("slotwise.core.policies.program.MAX_PROGRAMS", 3)
    policy = LeastServedProgram(1.0, quantum=10.0, half_life=100.0)

    def level(session: str, now: float) -> int:
        one = crowd([Comer(0, 70, 1, session=session)])[0][1]
        policy.arrived(one, now)
        found = policy._levels[one.request_id]
        policy.admitted(one, now)
        policy.finished(one, "abort", now)
        return found

    assert [level("a", 0.0), level("a", 0.0), level("a", 100.0), level("a", 2000.0)] == [0, 3, 3, 0]
    assert [level("", 0.0), level("", 0.0)] == [0, 0], "each without a session is one of its own"
    assert [level(name, 2000.0) for name in "abcda"] == [3, 0, 0, 0, 0], "of the session without service for longest"
    assert len(policy._service) == 3

"""What each policy promises, with a cache that is too small: bounds, no inversion, shares, objectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from crowds import ROOMY, Comer, KnownTimes, comers, crowd, play, running, terms, waiting
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Driver, alone

from slotwise.core.events import Admitted
from slotwise.core.reasons import NO_SLOT, OUTRANKED
from slotwise.core.request import Request, State
from slotwise.core.seams import Policy
from slotwise.core.terms import Terms
from slotwise.policies.deadline import Deadline
from slotwise.policies.fair import MAX_AWAY, OUTPUT, PROMPT, Fair
from slotwise.policies.fcfs import FirstComeFirstServed
from slotwise.policies.lengths import ENOUGH, KEPT, MAX_KINDS, Guesses
from slotwise.policies.priority import Priority
from slotwise.policies.shortest import PROMPT_SHARE, Shortest

TIGHT = replace(ROOMY, max_model_len=40, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=8)
SECONDS = st.sampled_from((1.0, 4.0, 30.0))
bounded = settings(max_examples=25, deadline=None)


class Starts(Driver):
    """Knows who started for the first time while whom was waiting for that."""

    def __init__(self, policy: Policy, limits=TIGHT) -> None:
        super().__init__(limits, policy=policy, times=KnownTimes())
        self.passed: list[tuple[Request, Request]] = []  # who went, before whom
        self.everyone: dict[str, Request] = {}
        self._unstarted: dict[str, Request] = {}

    def add(self, new: Request) -> None:
        self.everyone[new.request_id] = self._unstarted[new.request_id] = new
        super().add(new)

    def _fold(self) -> None:
        for event in self.scheduler._roster.events:
            if isinstance(event, Admitted):
                went = self.everyone[event.request_id]
                self._unstarted.pop(went.request_id, None)
                self.passed += [(went, left) for left in self._unstarted.values() if left.arrival < went.arrival]
        super()._fold()
        for name in self.ended:
            self._unstarted.pop(name, None)


def assert_right(driver: Starts) -> None:
    """Everyone ended once, with the tokens that are right."""
    assert driver.ended.keys() == driver.everyone.keys()
    for name, reason in driver.ended.items():
        if reason in ("stop", "length"):
            assert driver.output[name] == alone(driver.everyone[name], driver.limits)


# -- priority ----------------------------------------------------------------------------------------------------


@bounded
@given(SECONDS, st.integers(1, 3), comers(terms(priorities=(-2, 0, 1, 4))))
def test_waiting_makes_up_for_any_priority(ageing, gap, coming):
    driver = Starts(Priority(ageing, gap))
    play(driver, crowd(coming))
    assert_right(driver)
    for went, left in driver.passed:
        later = went.arrived_at - left.arrived_at
        assert later <= ageing * (left.terms.priority - went.terms.priority)


@bounded
@given(SECONDS, st.integers(1, 3), comers(terms(priorities=(-2, 0, 1, 4)), max_prompt=6, max_output=9))
def test_nobody_waits_for_a_slot_that_one_behind_it_has(ageing, gap, coming):
    def look(driver, plan):
        outranked = sum(decision.reason == OUTRANKED for decision in plan.preempted)
        if plan.stop is None or plan.stop.reason != NO_SLOT or outranked >= 4:
            return
        first = next(one for one in waiting(driver) if one.request_id == plan.stop.first_blocked)
        for one in running(driver):
            is_ahead = one.terms.priority - first.terms.priority >= gap
            earlier = first.arrived_at - one.arrived_at
            assert not (is_ahead and earlier < ageing * (one.terms.priority - first.terms.priority))

    driver = Starts(Priority(ageing, gap), replace(TIGHT, num_blocks=30))
    play(driver, crowd(coming), look)
    assert_right(driver)


def test_who_had_to_give_way_comes_back_and_ends():
    low = [Comer(0, 4, 20, Terms(priority=5))] * 4
    high = [Comer(1, 4, 6, Terms(priority=0))] * 12
    driver = Starts(Priority(60.0, 1))
    play(driver, crowd(low + high))
    assert {"r0", "r1", "r2", "r3"} & set(driver.preempted)
    assert_right(driver)


@given(st.builds(Terms, priority=st.integers(-9, 9)), st.builds(Terms, priority=st.integers(-9, 9)),
       st.floats(0, 100), st.floats(0, 100), SECONDS, st.integers(1, 9))
def test_only_who_goes_before_takes_a_place(terms_a, terms_b, came_a, came_b, ageing, gap):
    policy = Priority(ageing, gap)
    one, other = (crowd([Comer(0, 1, 1, terms)])[0][1] for terms in (terms_a, terms_b))
    one.arrived_at, other.arrived_at = came_a, came_b
    if policy.preempts(one, other, 100.0):
        assert policy.waiting_key(one, 100.0) < policy.running_key(other, 100.0)
        assert not policy.preempts(other, one, 100.0)


# -- shortest ----------------------------------------------------------------------------------------------------


@bounded
@given(SECONDS, st.booleans(), comers(terms(tenants=("a", "b")), max_size=40))
def test_nobody_is_passed_by_those_who_come_later_than_its_work_is_worth(ageing, oracle, coming):
    people = crowd(coming)
    for _, one in people:
        one.expected_tokens = len(alone(one, TIGHT))
    driver = Starts(Shortest(ageing, 0.5, oracle=oracle))
    play(driver, people)
    assert_right(driver)
    for went, left in driver.passed:
        work = left.num_prompt * PROMPT_SHARE + left.params.max_tokens
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


def test_what_is_kept_of_lengths_is_bounded():
    guesses = Guesses(0.5)
    for number in range(2 * MAX_KINDS):
        guesses.learn(f"tenant {number}", 1 + number, 7)
    assert len(guesses._kinds) <= MAX_KINDS
    for _ in range(2 * KEPT):
        guesses.learn("", 1, 9)
    assert all(len(lengths) <= KEPT for lengths in guesses._kinds.values())
    assert guesses.guess("", 1, 0) == 9, "old lengths are forgotten"


# -- fair --------------------------------------------------------------------------------------------------------


class Served:
    """Work done for each tenant while two always have something waiting: how far their differences spread."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.work: Counter[str] = Counter()
        self.spread: dict[tuple[str, str], tuple[float, float]] = {}
        self.widest = 0.0
        self.told: Counter[str] = Counter()
        self.charged: set[str] = set()

    def look(self, driver: Starts, plan) -> None:
        for name, one in driver.everyone.items():
            share = self.weights.get(one.terms.tier, 1.0)
            tokens = len(driver.output.get(name, ()))
            self.work[one.terms.tenant] += OUTPUT * (tokens - self.told[name]) / share
            self.told[name] = tokens
            if name not in self.charged and one.state is State.RUNNING:
                self.charged.add(name)
                self.work[one.terms.tenant] += PROMPT * one.num_prompt / share
        backlogged = sorted({one.terms.tenant for one in waiting(driver)})
        pairs = [(a, b) for a in backlogged for b in backlogged if a < b]
        self.spread = {pair: self._wider(pair) for pair in pairs}
        self.widest = max([self.widest, *(high - low for low, high in self.spread.values())])

    def _wider(self, pair: tuple[str, str]) -> tuple[float, float]:
        gap = self.work[pair[0]] - self.work[pair[1]]
        low, high = self.spread.get(pair, (gap, gap))
        return min(low, gap), max(high, gap)


def bound(longest_prompt: int, cache_tokens: int) -> float:
    return 2 * max(PROMPT * longest_prompt, OUTPUT * cache_tokens)


SMALL = replace(TIGHT, max_model_len=24, num_blocks=6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((0.0, 0.0, 20.0)),
       comers(terms(tenants=("a", "a", "a", "b", "c")), max_prompt=12, max_output=12, max_size=60))
def test_two_backlogged_tenants_never_drift_apart(credit, coming):
    driver, served = Starts(Fair({}, credit), SMALL), Served({})
    play(driver, crowd(coming), served.look)
    assert_right(driver)
    assert served.widest <= bound(12, SMALL.cache_tokens) + 2 * credit


@bounded
@given(comers(terms(tenants=("a", "b"), tiers=("gold", "")), max_size=60))
def test_service_is_counted_by_weight(coming):
    driver, served = Starts(Fair({"gold": 4.0}, 0.0), SMALL), Served({"gold": 4.0})
    play(driver, crowd(coming), served.look)
    assert_right(driver)
    assert served.widest <= bound(12, SMALL.cache_tokens)


def flood(policy: Policy) -> float:
    """How far tenants drift apart where one brought a hundred before another came with twenty."""
    coming = [Comer(0, 4, 8, Terms(tenant="flood"))] * 100 + [Comer(1, 4, 8, Terms(tenant="light"))]
    coming += [Comer(0, 4, 8, Terms(tenant="light"))] * 20
    driver, served = Starts(policy, SMALL), Served({})
    play(driver, crowd(coming), served.look)
    return served.widest


def test_the_bound_is_one_that_first_come_first_served_breaks():
    assert flood(Fair({}, 0.0)) <= bound(4, SMALL.cache_tokens) < flood(FirstComeFirstServed())


def test_twice_the_weight_is_twice_the_service():
    heavy, light = Terms("heavy", "gold"), Terms("light", "")
    driver, done = Starts(Fair({"gold": 2.0})), Counter()

    def look(driver, plan):
        if {one.terms.tenant for one in waiting(driver)} == {"heavy", "light"}:
            for one in driver.everyone.values():
                done[one.request_id] = len(driver.output.get(one.request_id, ()))

    play(driver, crowd([Comer(0, 1, 6, terms) for _ in range(60) for terms in (heavy, light)]), look)
    shares = Counter()
    for name, tokens in done.items():
        shares[driver.everyone[name].terms.tenant] += tokens
    assert 1.7 < shares["heavy"] / shares["light"] < 2.3


@pytest.mark.parametrize("credit", [0.0, 90.0])
def test_being_away_earns_no_credit_beyond_what_is_allowed(credit):
    busy, back = Terms("busy"), Terms("back")
    coming = [Comer(0, 1, 4, back), *[Comer(0, 1, 4, busy)] * 60, Comer(9, 1, 4, back), *[Comer(0, 1, 4, back)] * 39]
    driver, served = Starts(Fair({}, credit)), Served({})
    play(driver, crowd(coming), served.look)
    assert served.widest <= bound(1, TIGHT.cache_tokens) + 2 * credit
    first = driver.admitted.index("r61") + int(credit / 9)  # of one token and four, each is 9
    soon = [driver.everyone[name].terms.tenant for name in driver.admitted[first : first + 12]]
    assert 3 <= soon.count("busy") <= 9, "they share from the moment its credit is used"


def test_no_slot_is_kept_empty_for_a_share():
    driver = Starts(Fair({}), replace(TIGHT, num_blocks=64))
    free = []
    play(driver, crowd([Comer(0, 1, 9, Terms("one"))] * 12),
         lambda driver, plan: free.append(4 - len(running(driver)) if waiting(driver) else 0))
    assert not any(free)


def test_what_is_kept_of_tenants_is_bounded():
    policy = Fair({})
    driver = Starts(policy)
    for number in range(3 * MAX_AWAY):
        one = crowd([Comer(0, 1, 1, Terms(f"tenant {number}"))])[0][1]
        driver.add(one)
        driver.plan()
        driver.commit()
        driver.everyone.clear()
        driver.plans.clear()
        driver.ended.clear()
    assert len(policy.counters) <= 2 * MAX_AWAY + 1
    assert not policy._living and not policy._waiting and not policy._charged


# -- deadline ----------------------------------------------------------------------------------------------------


def latest_start(one: Request, default: float) -> float:
    return one.arrived_at + (one.terms.ttft or default) - KnownTimes.TOKEN * one.num_prompt


@bounded
@given(SECONDS, SECONDS, comers(terms(ttfts=(None, 1.0, 6.0, 25.0))))
def test_nobody_who_is_late_waits_for_ever(ttft, ageing, coming):
    driver = Starts(Deadline(KnownTimes(), ttft, ageing, sheds=False))
    play(driver, crowd(coming))
    assert_right(driver)
    for went, left in driver.passed:
        assert went.arrived_at - left.arrived_at <= max(ageing, left.terms.ttft or ttft)


@bounded
@given(SECONDS, comers(terms(ttfts=(None, 1.0, 6.0, 25.0)), max_prompt=8))
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
    driver.scheduler._roster.yield_place(one, 0, driver.now)
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
    late, soon = Terms(ttft=0.5), Terms(ttft=20.0)
    driver = Starts(Deadline(KnownTimes(), 9.0, 60.0, sheds=False), replace(ROOMY, max_num_seqs=1))
    play(driver, crowd([Comer(0, 1, 5), Comer(0, 4, 5, late), Comer(0, 4, 5, soon)]))
    assert driver.admitted == ["r0", "r2", "r1"]

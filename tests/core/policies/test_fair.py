"""What `fair` promises: a bounded gap between tenants, shares by weight, no places that change hands for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.crowds import TIGHT, Comer, Starts, assert_right, comers, crowd, play, running, slo, waiting

from slotwise.core.interfaces import Policy
from slotwise.core.policies import fair
from slotwise.core.policies.fair import OUTPUT, PROMPT, Fair
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import State
from slotwise.core.scheduler_limits import SLO


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
            share = self.weights.get(one.spec.slo.tier, 1.0)
            tokens = len(driver.output.get(name, ()))
            self.work[one.spec.slo.tenant] += OUTPUT * (tokens - self.told[name]) / share
            self.told[name] = tokens
            if name not in self.charged and one.state is State.RUNNING:
                self.charged.add(name)
                self.work[one.spec.slo.tenant] += PROMPT * one.num_prompt / share
        backlogged = sorted({one.spec.slo.tenant for one in waiting(driver)})
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
       comers(slo(tenants=("a", "a", "a", "b", "c")), max_prompt=12, max_output=12, max_size=60))
def test_two_backlogged_tenants_never_drift_apart(credit, coming):
    driver, served = Starts(Fair({}, credit), SMALL), Served({})
    play(driver, crowd(coming), served.look)
    assert_right(driver)
    assert served.widest <= bound(12, SMALL.cache_tokens) + 2 * credit


HEAVY_A, LIGHT_A, HEAVY_B, LIGHT_B = (SLO(tenant, tier) for tenant in "ab" for tier in ("gold", ""))
FOR_EVER = [  # of one step after another: r6 took r5's place, and r5, first in line at a tie, took the free one
    Comer(0, 8, 19, HEAVY_B), Comer(2, 2, 4, HEAVY_A), Comer(1, 8, 8, LIGHT_B), Comer(0, 3, 2, HEAVY_B),
    Comer(0, 7, 2, LIGHT_A), Comer(0, 7, 5, LIGHT_B), Comer(0, 3, 15, HEAVY_A), Comer(0, 7, 4, LIGHT_A)]


@settings(max_examples=60, deadline=None)
@example(FOR_EVER)
@given(comers(slo(tenants=("a", "b"), tiers=("gold", "")), max_size=60))
def test_service_is_counted_by_weight(coming):
    driver, served = Starts(Fair({"gold": 4.0}, 0.0), SMALL), Served({"gold": 4.0})
    play(driver, crowd(coming), served.look)
    assert_right(driver)
    assert served.widest <= bound(12, SMALL.cache_tokens)


def flood(policy: Policy) -> float:
    """How far tenants drift apart where one brought a hundred before another came with twenty."""
    coming = [Comer(0, 4, 8, SLO(tenant="flood"))] * 100 + [Comer(1, 4, 8, SLO(tenant="light"))]
    coming += [Comer(0, 4, 8, SLO(tenant="light"))] * 20
    driver, served = Starts(policy, SMALL), Served({})
    play(driver, crowd(coming), served.look)
    return served.widest


def test_the_bound_is_one_that_first_come_first_served_breaks():
    assert flood(Fair({}, 0.0)) <= bound(4, SMALL.cache_tokens) < flood(FirstComeFirstServed())


def test_twice_the_weight_is_twice_the_service():
    heavy, light = SLO("heavy", "gold"), SLO("light", "")
    driver, done = Starts(Fair({"gold": 2.0})), Counter()

    def look(driver, plan):
        if {one.spec.slo.tenant for one in waiting(driver)} == {"heavy", "light"}:
            for one in driver.everyone.values():
                done[one.request_id] = len(driver.output.get(one.request_id, ()))

    play(driver, crowd([Comer(0, 1, 6, slo) for _ in range(60) for slo in (heavy, light)]), look)
    shares = Counter()
    for name, tokens in done.items():
        shares[driver.everyone[name].spec.slo.tenant] += tokens
    assert 1.7 < shares["heavy"] / shares["light"] < 2.3


@pytest.mark.parametrize("credit", [0.0, 90.0])
def test_being_away_earns_no_credit_beyond_what_is_allowed(credit):
    busy, back = SLO("busy"), SLO("back")
    coming = [Comer(0, 1, 4, back), *[Comer(0, 1, 4, busy)] * 60, Comer(9, 1, 4, back), *[Comer(0, 1, 4, back)] * 39]
    driver, served = Starts(Fair({}, credit)), Served({})
    play(driver, crowd(coming), served.look)
    assert served.widest <= bound(1, TIGHT.cache_tokens) + 2 * credit
    first = driver.admitted.index("r61") + int(credit / 9)  # of one token and four, each is 9
    soon = [driver.everyone[name].spec.slo.tenant for name in driver.admitted[first : first + 12]]
    assert 3 <= soon.count("busy") <= 9, "they share from the moment its credit is used"


def test_no_slot_is_kept_empty_for_a_share():
    driver = Starts(Fair({}), replace(TIGHT, num_blocks=64))
    free = []
    play(driver, crowd([Comer(0, 1, 9, SLO("one"))] * 12),
         lambda driver, plan: free.append(4 - len(running(driver)) if waiting(driver) else 0))
    assert not any(free)


def test_what_is_kept_of_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(fair, "MAX_AWAY", 100)
    policy = Fair({})
    driver = Starts(policy)
    for number in range(3 * 100):
        one = crowd([Comer(0, 1, 1, SLO(f"tenant {number}"))])[0][1]
        driver.add(one)
        driver.plan()
        driver.commit()
        driver.everyone.clear()
        driver.plans.clear()
        driver.ended.clear()
    assert len(policy.counters) <= 201
    assert not policy._unfinished and not policy._waiting and not policy._charged



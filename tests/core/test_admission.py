"""Slots that are kept for tiers, and places that are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, Comer, comers, crowd, play, running, slo, waiting
from support.toy import Driver, alone

from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.policies.priority import Priority
from slotwise.core.reasons import TIER_CAP
from slotwise.core.scheduler_limits import SLO, SchedulerLimits, Tier

TIERS = (Tier("gold", slots=2), Tier("silver", slots=1), Tier("bulk"))
LIMITS = replace(ROOMY, max_num_seqs=5, tiers=TIERS)
POLICIES = (FirstComeFirstServed, lambda: Priority(8.0, 1))
SILVER_FLOOD = [Comer(0, 2, 12, SLO(tier="silver"))] * 40


def num_kept_from(driver: Driver, tier: str) -> int:
    """Slots that are kept for other tiers and that these do not use."""
    names = [one.spec.slo.tier for one in running(driver)]
    return sum(max(0, other.slots - names.count(other.name)) for other in driver.limits.tiers if other.name != tier)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(POLICIES), st.integers(4, 6),
       comers(slo(tiers=("gold", "silver", "bulk", ""), priorities=(0, 0, 3)), max_size=30))
def test_kept_slots_are_never_taken_and_the_reason_is_named(policy, slots, coming):
    limits = replace(LIMITS, max_num_seqs=slots)
    people = crowd(coming)

    def look(driver, plan):
        used = [one.spec.slo.tier for one in running(driver)]
        unkept = slots - sum(tier.slots for tier in TIERS)
        beyond = sum(max(0, used.count(tier.name) - tier.slots) for tier in TIERS) + used.count("")
        assert beyond <= unkept
        capped = {decision.request_id for decision in plan.refused if decision.reason == TIER_CAP}
        for one in waiting(driver):
            if one.request_id in capped:
                assert slots - len(used) <= num_kept_from(driver, one.spec.slo.tier)

    driver = Driver(limits, policy=policy())
    play(driver, people, look)
    assert driver.output == {one.request_id: alone(one, limits) for _, one in people}


def test_a_flood_of_one_tier_keeps_nobody_of_another_waiting():
    driver = Driver(LIMITS)
    play(driver, crowd([*SILVER_FLOOD, *[Comer(3, 2, 3, SLO(tier="gold"))] * 10]), lambda driver, plan: (
        [pytest.fail("gold waits") for one in waiting(driver) if one.spec.slo.tier == "gold"]))
    assert len(driver.ended) == 50


def test_kept_slots_stay_kept_where_fewer_slots_are_used_than_were_made():
    driver = Driver(replace(LIMITS, max_num_seqs=8))
    driver.configure(driver.discipline, 5, 100)
    seen = []
    play(driver, crowd(SILVER_FLOOD), lambda driver, plan: seen.append(len(running(driver))))
    assert max(seen) == 3


def test_who_waits_for_a_kept_slot_may_take_the_place_of_one_who_uses_another():
    """The head of the queue finds the free slots kept for gold; one that runs in a slot anyone may use goes after it.
    """
    driver = Driver(LIMITS, policy=Priority(60.0, 1))
    play(driver, crowd([
        *[Comer(0, 2, 20, SLO(tier="bulk", priority=5))] * 2, Comer(2, 2, 3, SLO(tier="bulk"))]))
    assert driver.admitted[:3] == ["r0", "r1", "r2"] and driver.preempted[0] == "r1"


def test_tiers_leave_a_slot_for_those_of_no_tier():
    """Else these would wait for ever."""
    with pytest.raises(ValueError, match="keep"):
        SchedulerLimits(max_model_len=64, num_blocks=64, block_size=4, max_num_seqs=4,
                        tiers=(Tier("a", slots=2), Tier("b", slots=2)))

"""Every policy with every discipline: all end once with their own tokens, and no slot is idle without a reason."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crowds import ROOMY, Comer, KnownTimes, comers, crowd, play, running, slo, waiting
from support.toy import Driver, alone

from slotwise.core import reasons
from slotwise.core.disciplines.batching_settings import Batching
from slotwise.core.policies.policy_settings import Ordering
from slotwise.core.prefill_isolation import SHORT
from slotwise.core.record import StepPlan
from slotwise.core.scheduler_limits import SLO, Tier

BATCHINGS = (
    Batching(), Batching(long_prefill_token_threshold=3), Batching(prefill="inline"), Batching(prefill="alone"),
    Batching("orca"), Batching("static"), Batching("dynamic", max_wait_ms=2000), Batching("one_at_a_time"))
ORDERINGS = (
    Ordering(), Ordering("priority", ageing=4.0), Ordering("priority", ageing=30.0, preemption_gap=3),
    Ordering("shortest", ageing=8.0), Ordering("shortest", length_oracle=True), Ordering("fair"),
    Ordering("program", ageing=4.0),
    Ordering("deadline", ageing=9.0, default_ttft_ms=6000.0),
    Ordering("deadline", default_ttft_ms=9000.0, shed_late=True))
TIERS = (Tier("gold", weight=3.0, slots=1), Tier("bulk", priority=2))
TIGHT = replace(ROOMY, max_model_len=40, num_blocks=15, max_num_seqs=4, max_num_batched_tokens=9, watermark_blocks=1)
ANY_TERMS = slo(
    ("", "a", "b"), ("", "gold", "bulk"), (-1, 0, 3), (None, 2.0, 12.0), (None, None, 0.5))
LIMITS = st.builds(
    lambda blocks, passes, tiers, step, stall: replace(
        TIGHT, num_blocks=blocks, max_passes=passes, tiers=tiers, max_step_ms=step, max_stall_ms=stall),
    st.integers(10, 24), st.integers(0, 2), st.sampled_from(((), TIERS)), st.sampled_from((None, 500.0, 3000.0)),
    st.sampled_from((None, 700.0, 2000.0)))


def driver_of(limits, batching: Batching, ordering: Ordering) -> Driver:
    times = KnownTimes()
    return Driver(limits, batching.discipline(limits.max_num_seqs), ordering.policy(limits.tiers, times), times)


def people_of(coming: list[Comer], limits) -> list:
    people = crowd(coming)
    for _, one in people:
        one.spec = replace(one.spec, forced_length=len(alone(one, limits)))
    return people


def assert_everyone_ended(driver: Driver, people: list) -> None:
    assert driver.ended.keys() == {one.request_id for _, one in people}
    for _, one in people:
        tokens, reason = driver.output.get(one.request_id, []), driver.ended[one.request_id]
        assert reason in ("stop", "length", "shed")
        assert tokens == ([] if reason == "shed" else alone(one, driver.limits))
    assert driver.scheduler.num_free_blocks == driver.limits.num_blocks
    assert driver.scheduler.num_running == driver.scheduler.num_waiting == 0


def assert_nothing_is_idle(driver: Driver, plan: StepPlan) -> None:
    """Whoever waits does so for a reason that is true."""
    pressed = sum(decision.reason == reasons.NO_BLOCKS for decision in plan.preempted)
    if not waiting(driver) or (plan.stop is None and pressed):
        return  # where prompts go alone, those who yield do so after admission
    assert plan.stop is not None, "somebody waits, and nobody is told why"
    limits, first = driver.limits, next(
        one for one in waiting(driver) if one.request_id == plan.stop.first_blocked)
    num_free = limits.max_num_seqs - len(running(driver))
    match plan.stop.reason:
        case reasons.NO_SLOT:
            assert num_free <= pressed
        case reasons.NO_BLOCKS:
            needed = -(-driver.discipline.reserve(first) // limits.block_size)
            grows = driver.discipline.reserve(first) < first.max_len - 1
            assert pressed or needed + limits.watermark_blocks * grows > driver.scheduler.num_free_blocks
        case reasons.TOKEN_BUDGET:
            assert sum(plan.counts) >= driver.discipline.budget(limits)
        case reasons.SHORT_STEP:
            assert sum(plan.counts) >= driver.discipline.budget(limits) // SHORT
        case reasons.TIME_BUDGET:
            assert plan.counts and driver.scheduler.num_running
        case reasons.TIER_CAP:
            names = [one.spec.slo.tier for one in running(driver)]
            kept = sum(max(0, tier.slots - names.count(tier.name)) for tier in limits.tiers
                       if tier.name != first.spec.slo.tier)
            assert num_free <= kept + pressed
        case reasons.BATCH_RUNNING | reasons.ONE_AT_A_TIME:
            assert running(driver)
        case reasons.FIRST_TOKEN:
            tenants = {one.request_id: one.spec.slo.tenant for one in running(driver)}
            assert any(tenants[name] != first.spec.slo.tenant for name in plan.request_ids)
        case reasons.WINDOW_OPEN:
            assert driver.now < plan.stop.reopens_at
        case other:
            raise AssertionError(f"no reason to wait: {other}")


@settings(max_examples=40, deadline=None)
@given(LIMITS, st.sampled_from(BATCHINGS), st.sampled_from(ORDERINGS), comers(ANY_TERMS))
def test_everyone_ends_once_with_their_own_tokens_and_no_slot_is_idle(limits, batching, ordering, coming):
    driver, people = driver_of(limits, batching, ordering), people_of(coming, limits)
    play(driver, people, assert_nothing_is_idle)
    assert_everyone_ended(driver, people)


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: f"{batching.kind}-{batching.prefill}")
@pytest.mark.parametrize("ordering", ORDERINGS, ids=lambda ordering: ordering.kind)
def test_the_product_gives_equal_plans_for_equal_input(batching, ordering):
    draw = Random(7)
    coming = [
        Comer(draw.choice((0, 0, 1, 5)), draw.randint(1, 14), draw.randint(1, 20), SLO(
            draw.choice("ab"), draw.choice(("gold", "bulk", "")), draw.randint(-1, 3), draw.choice((None, 5.0, 20.0))))
        for _ in range(25)]
    limits = replace(TIGHT, tiers=TIERS, max_passes=2)
    lives = []
    for _ in range(2):
        driver, people = driver_of(limits, batching, ordering), people_of(coming, limits)
        play(driver, people, assert_nothing_is_idle)
        assert_everyone_ended(driver, people)
        lives.append(driver.plans)
    assert lives[0] == lives[1]

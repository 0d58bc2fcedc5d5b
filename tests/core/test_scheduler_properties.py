"""Random lives: whatever is added, aborted, planned and committed in whatever order, the core's laws hold."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from support.operations import DISCIPLINE, LIMITS, OPERATION, PROMPT, TERMS, play

from slotwise.core.reasons import ENDING, MICRO_BATCH, PROMPTS_ALONE, TIME_BUDGET, TOKEN_BUDGET


@settings(max_examples=100, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=60))
def test_every_request_ends_once_with_its_own_tokens(limits, discipline, operations):
    driver, expected = play(limits, discipline, operations)
    assert driver.ended.keys() == expected.keys()
    for name, reason in driver.ended.items():
        got = driver.output.get(name, [])
        if reason in ("rejected", "timeout", "shed"):
            assert got == []
        elif reason in ("abort", "error"):
            assert got == expected[name][: len(got)]
        else:
            assert got == expected[name]
    assert driver.scheduler.num_free_blocks == limits.num_blocks


@settings(max_examples=80, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=40))
def test_the_same_calls_give_the_same_plans(limits, discipline, operations):
    first, _ = play(limits, discipline, operations)
    second, _ = play(limits, discipline, operations)
    assert first.plans == second.plans


@settings(max_examples=80, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(OPERATION, max_size=60))
def test_whoever_has_a_slot_runs_or_is_told_why_and_so_is_the_first_who_waits(limits, discipline, operations):
    driver, _ = play(limits, discipline, operations)
    seated: dict[int, str] = {}
    for plan in driver.plans:
        for slot in plan.released_slots:
            seated.pop(slot, None)
        seated |= {join.slot: join.request_id for join in plan.new_requests}
        named = {decision.request_id: decision.reason for decision in plan.refused}
        rows = set(plan.request_ids)
        assert rows <= set(seated.values())
        for name in set(seated.values()) - rows:
            assert named[name] in (ENDING, MICRO_BATCH, TOKEN_BUDGET, PROMPTS_ALONE, TIME_BUDGET)
        if plan.stop:
            assert named[plan.stop.first_blocked] == plan.stop.reason


@settings(max_examples=100, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.just(0), TERMS, st.just(inf)), min_size=1, max_size=20))
def test_first_come_first_served_starts_in_order_of_arrival(limits, discipline, operations):
    driver, _ = play(replace(limits, max_passes=0), discipline, operations)
    first_starts = list(dict.fromkeys(driver.admitted))
    assert first_starts == sorted(first_starts, key=lambda name: int(name[1:]))

"""Random lives: whatever is added, aborted, planned and committed in whatever order, the core's laws hold."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from toy import VOCAB, Driver, alone, request

from slotwise.batching.continuous import Alone, Chunked, Inline
from slotwise.batching.groups import Dynamic, OneAtATime, Static
from slotwise.batching.orca import Orca
from slotwise.core.interfaces import Discipline
from slotwise.core.limits import ERROR, RECOMPUTE, SchedulerLimits
from slotwise.core.reasons import ENDING, PROMPTS_ALONE, TIME_BUDGET, TOKEN_BUDGET
from slotwise.core.slo import SLO, Tier
from slotwise.core.step_time import StepTimeModel
from slotwise.policies.settings import Ordering

LIMITS = st.builds(
    lambda slots, extra, **others: SchedulerLimits(
        max_num_seqs=slots, max_num_batched_tokens=slots + extra, **others),
    st.integers(1, 6), st.integers(0, 20), num_blocks=st.integers(1, 12), block_size=st.integers(1, 5),
    max_model_len=st.integers(2, 40), enable_prefix_caching=st.booleans(), watermark_blocks=st.integers(0, 2),
    max_passes=st.integers(0, 3), on_pressure=st.sampled_from((RECOMPUTE, RECOMPUTE, ERROR)))
DISCIPLINE = st.one_of(
    st.builds(Chunked, st.integers(0, 7)),
    st.builds(Inline), st.builds(Alone), st.builds(Orca), st.builds(OneAtATime), st.builds(Static, st.integers(1, 6)),
    st.builds(Dynamic, st.integers(1, 6), st.floats(0, 5)))
BEGINNINGS = ([], [3] * 12, [3] * 6 + [7] * 6, list(range(16)))
PROMPT = st.builds(
    lambda beginning, rest: [*beginning, *rest], st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
TENANT = st.sampled_from(("", "", "other"))
PATIENCE = st.sampled_from((inf, inf, 3.0, 0.0))  # seconds in the queue
TERMS = st.builds(
    SLO, TENANT, st.sampled_from(("", "gold", "bulk")), st.integers(-2, 2), st.sampled_from((None, 2.0, 20.0)),
    st.sampled_from((None, None, 1.0)))
POLICY = st.sampled_from((
    Ordering(), Ordering("priority", ageing=5.0), Ordering("shortest"), Ordering("fair"),
    Ordering("deadline", ageing=9.0, default_ttft_ms=5000.0),
    Ordering("deadline", default_ttft_ms=9000.0, shed_late=True)))
STEPS = st.builds(
    lambda step_ms, stall_ms, kept: {
        "max_step_ms": step_ms, "max_stall_ms": stall_ms,
        "tiers": (Tier("gold", slots=1), Tier("bulk", weight=2.0)) if kept else ()},
    st.sampled_from((None, 800.0, 5000.0)), st.sampled_from((None, 500.0)), st.booleans())
OPERATION = st.one_of(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.integers(0, 3), TERMS, PATIENCE),
    st.tuples(st.just("jump"), st.floats(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("switch"), DISCIPLINE, st.integers(2, 6), st.integers(0, 20)),
    st.tuples(st.just("order"), POLICY, STEPS),
)


def play(
    limits: SchedulerLimits, discipline: Discipline, operations: list[tuple],
) -> tuple[Driver, dict[str, list[int]]]:
    """Carry out `operations`, then run to the end: the driver, and the output each request should have had."""
    times = StepTimeModel()
    driver, expected = Driver(limits, discipline, times=times), {}
    for operation in operations:
        match operation:
            case ("jump", seconds):
                driver.now += seconds
            case ("add", prompt, max_tokens, min_tokens, slo, patience):
                name = f"r{len(expected)}"
                new = request(
                    name, prompt, max_tokens, slo.tenant, slo, min_tokens=min(min_tokens, max_tokens))
                new.deadline = driver.now + patience
                expected[name] = alone(new, limits)
                driver.add(new)
            case ("abort", number):
                driver.finish(f"r{number}")
            case ("plan",) if len(driver.flying) < 2:
                driver.plan()
            case ("commit",) if driver.flying:
                driver.commit()
            case ("switch", other, slots, extra):
                driver.configure(other, min(slots, limits.max_num_seqs), extra)
            case ("order", ordering, steps) if driver.limits.max_num_seqs > 1:
                driver.limits = replace(driver.limits, **steps)
                spare = driver.limits.max_num_batched_tokens - driver.limits.max_num_seqs
                driver.configure(driver.discipline, driver.limits.max_num_seqs, spare, ordering.policy(
                    driver.limits.tiers, times))
    driver.run()
    return driver, expected


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
            assert named[name] in (ENDING, TOKEN_BUDGET, PROMPTS_ALONE, TIME_BUDGET)
        if plan.stop:
            assert named[plan.stop.first_blocked] == plan.stop.reason


@settings(max_examples=100, deadline=None)
@given(LIMITS, DISCIPLINE, st.lists(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.just(0), TERMS, st.just(inf)), min_size=1, max_size=20))
def test_first_come_first_served_starts_in_order_of_arrival(limits, discipline, operations):
    driver, _ = play(replace(limits, max_passes=0), discipline, operations)
    first_starts = list(dict.fromkeys(driver.admitted))
    assert first_starts == sorted(first_starts, key=lambda name: int(name[1:]))

"""Random lives: whatever is added, aborted, planned and committed in whatever order, the core's laws hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from toy import VOCAB, Driver, alone, request

from slotwise.core.limits import SchedulerLimits

LIMITS = st.builds(
    lambda slots, extra, blocks, size, threshold, longest: SchedulerLimits(
        max_model_len=longest, num_blocks=blocks, block_size=size, max_num_seqs=slots,
        max_num_batched_tokens=slots + extra, long_prefill_token_threshold=threshold),
    st.integers(1, 6), st.integers(0, 20), st.integers(1, 12), st.integers(1, 5), st.integers(0, 7),
    st.integers(2, 40))
PROMPT = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
OPERATION = st.one_of(
    st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("commit")),
)


def play(limits: SchedulerLimits, operations: list[tuple]) -> tuple[Driver, dict[str, list[int]]]:
    """Carry out `operations`, then run to the end: the driver, and the output each request should have had."""
    driver, expected = Driver(limits), {}
    for operation in operations:
        match operation:
            case ("add", prompt, max_tokens, min_tokens):
                name = f"r{len(expected)}"
                new = request(name, prompt, max_tokens, min_tokens=min(min_tokens, max_tokens))
                expected[name] = alone(new, limits)
                driver.add(new)
            case ("abort", number):
                driver.finish(f"r{number}")
            case ("plan",) if len(driver.flying) < 2:
                driver.plan()
            case ("commit",) if driver.flying:
                driver.commit()
    driver.run()
    return driver, expected


@settings(max_examples=400, deadline=None)
@given(LIMITS, st.lists(OPERATION, max_size=60))
def test_every_request_ends_once_with_its_own_tokens(limits, operations):
    driver, expected = play(limits, operations)
    assert driver.ended.keys() == expected.keys()
    for name, reason in driver.ended.items():
        got = driver.output.get(name, [])
        if reason == "rejected":
            assert got == []
        elif reason == "abort":
            assert got == expected[name][: len(got)]
        else:
            assert got == expected[name]
    assert driver.scheduler.num_free_blocks == limits.num_blocks


@settings(max_examples=100, deadline=None)
@given(LIMITS, st.lists(OPERATION, max_size=40))
def test_the_same_calls_give_the_same_plans(limits, operations):
    first, _ = play(limits, operations)
    second, _ = play(limits, operations)
    assert first.plans == second.plans


@settings(max_examples=200, deadline=None)
@given(LIMITS, st.lists(OPERATION, max_size=60))
def test_every_running_row_moves_and_whoever_waits_is_told_why(limits, operations):
    driver, _ = play(limits, operations)
    running: set[int] = set()
    for plan in driver.plans:
        running = (running - set(plan.leaves)) | {join.slot for join in plan.joins}
        named = {decision.reason for decision in plan.refused}
        assert set(plan.slots) <= running
        if len(plan.slots) < len(running):
            assert named >= {"ending"}, "a row stood still without a reason"
        if plan.stop:
            assert plan.refused[-1] == (plan.stop.first_blocked, plan.stop.reason)


@settings(max_examples=200, deadline=None)
@given(LIMITS, st.lists(st.tuples(st.just("add"), PROMPT, st.integers(1, 20), st.just(0)), min_size=1, max_size=20))
def test_first_come_first_served_starts_in_order_of_arrival(limits, operations):
    driver, _ = play(limits, operations)
    first_starts = list(dict.fromkeys(driver.admitted))
    assert first_starts == sorted(first_starts, key=lambda name: int(name[1:]))

"""Rows that cruise: planned and committed as columns, and nobody outside can tell but by the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from crowds import KnownTimes
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import EOS, VOCAB, Driver, alone, next_token, request

from slotwise.core.cruise import Cruise
from slotwise.core.limits import SchedulerLimits
from slotwise.core.plan import StepResult
from slotwise.core.reasons import TIME_BUDGET
from slotwise.core.request import Request
from slotwise.core.seams import Key
from slotwise.policies.fcfs import FirstComeFirstServed

LIMITS = SchedulerLimits(
    max_model_len=64, num_blocks=400, block_size=4, max_num_seqs=6, max_num_batched_tokens=16,
    enable_prefix_caching=True)
OPERATIONS = st.lists(st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14), st.integers(1, 30)),
    st.tuples(st.just("abort"), st.integers(0, 12)),
    st.tuples(st.just("plan")), st.tuples(st.just("plan")), st.tuples(st.just("commit")),
), max_size=80)


def lasting(name: str, num_prompt: int = 3, max_tokens: int = 40) -> Request:
    """A request that only its length ends."""
    return request(name, [1 + i % 7 for i in range(num_prompt)], max_tokens, ignore_eos=True)


def lived(operations: list[tuple]) -> Driver:
    """With blocks for all, so that nobody yields."""
    driver, count = Driver(LIMITS), 0
    for operation in operations:
        match operation:
            case ("add", prompt, max_tokens):
                driver.add(request(f"r{count}", prompt, max_tokens))
                count += 1
            case ("abort", number):
                driver.finish(f"r{number}")
            case ("plan",) if len(driver.flying) < 2:
                driver.plan()
            case ("commit",) if driver.flying:
                driver.commit()
    driver.run()
    return driver


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_every_step_has_the_rows_that_it_would_have_if_nobody_cruised(operations):
    cruising = lived(operations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cruise, "may_take", lambda self, request: False)
        plain = lived(operations)
    assert (cruising.output, cruising.ended) == (plain.output, plain.ended)
    for ours, theirs in zip(cruising.plans, plain.plans, strict=True):
        rows, others = (
            sorted(zip(plan.request_ids, plan.slots, plan.starts, plan.counts, plan.samples, strict=True))
            for plan in (ours, theirs))
        assert rows == others
        assert (sorted(ours.leaves), ours.joins, sorted(ours.refused), ours.stop) == (
            sorted(theirs.leaves), theirs.joins, sorted(theirs.refused), theirs.stop)


class Watchful(FirstComeFirstServed):
    """Notes whom a plan looks at."""

    orders_running = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def running_key(self, request: Request, now: float) -> Key:
        self.seen.append(request.request_id)
        return super().running_key(request, now)


def test_a_row_in_its_course_is_looked_at_for_its_last_token_alone():
    policy = Watchful()
    driver = Driver(LIMITS, policy=policy)
    driver.add(lasting("a", num_prompt=5))
    driver.add(lasting("b", num_prompt=5, max_tokens=20))
    driver.run()
    assert len(driver.plans) == 40 and policy.seen == ["b", "a"]
    assert sum(len(grant.blocks) for plan in driver.plans for grant in plan.grants) == 44 // 4 + 24 // 4


@pytest.mark.parametrize("depth", (0, 1))
def test_whoever_looks_at_one_that_cruises_sees_how_far_it_is(depth):
    driver, one = Driver(LIMITS), lasting("a")
    driver.add(one)
    driver.plan()
    for step in range(30):
        if depth:
            driver.plan()
        driver.commit()
        if not depth:
            driver.plan()
        assert (one.pending, one.num_known, one.num_scheduled) == (1, 3 + step + 2, 3 + step + 1)
        assert (one.num_output, one.num_computed) == (step + 1, 3 + step)
    assert one.cruise is not None


def test_a_block_that_a_cruising_row_fills_is_found_in_the_next_plan():
    driver, first = Driver(LIMITS), lasting("a", num_prompt=4)
    driver.add(first)
    for _ in range(9):
        driver.plan()
        driver.commit()
    assert first.num_computed == 12 and first.cruise is not None
    driver.add(request("b", [*first.tokens[:12], 5], 2))
    plan = driver.plan()
    assert plan.starts[plan.request_ids.index("b")] == 12


def test_a_token_that_ends_one_row_does_not_end_its_neighbours():
    driver = Driver(LIMITS)
    ending, other = request("a", [3], 50, stop_token_ids=(next_token([3, 9, 9, 9, 9, 9]),)), lasting("b", 1, 50)
    for one in (ending, other):
        driver.add(one)
    for _ in range(5):
        plan = driver.scheduler.plan(0.0)
        driver.scheduler.commit(plan, StepResult(plan.step, ((9,), (9,))), 0.0)
    assert ending.cruise is not None and other.cruise is not None
    last = next(iter(ending.stop_ids - {EOS}))
    plan = driver.scheduler.plan(0.0)
    driver.scheduler.commit(plan, StepResult(plan.step, ((last,), (last,))), 0.0)
    assert (ending.reason, other.reason) == ("stop", "")
    assert ending.tokens == [3, 9, 9, 9, 9, 9, last] and other.tokens[1:] == [9, 9, 9, 9, 9, last]
    driver.scheduler.check()


def test_where_one_row_fails_all_others_go_on():
    driver = Driver(LIMITS)
    failing, other = lasting("a"), lasting("b")
    driver.add(failing)
    driver.add(other)
    for _ in range(4):
        driver.plan()
        driver.commit()
    plan = driver.scheduler.plan(0.0)
    driver.scheduler.commit(plan, StepResult(plan.step, ((), (7,)), failed=(0,)), 0.0)
    assert failing.reason == "error" and other.tokens[-1] == 7
    driver.scheduler.check()


def test_when_blocks_run_out_the_last_of_those_who_cruise_yields():
    driver = Driver(replace(LIMITS, num_blocks=10, enable_prefix_caching=False))
    people = [lasting(name, max_tokens=26) for name in ("a", "b")]
    for one in people:
        driver.add(one)
    for _ in range(10):
        driver.plan()
        driver.commit()
    assert all(one.cruise is not None for one in people)
    driver.run()
    assert set(driver.preempted) == {"b"}
    assert driver.output == {one.request_id: alone(one, LIMITS) for one in people}


class Slow(KnownTimes):
    def seconds(self, work):
        return 0.020 if work.rows else 0.0


def test_the_time_of_those_who_cruise_is_spent():
    driver = Driver(replace(LIMITS, max_step_ms=10.0), times=Slow())
    driver.add(lasting("a"))
    for _ in range(6):
        driver.plan()
        driver.commit()
    driver.add(lasting("b"))
    plan = driver.plan()
    assert plan.request_ids == ("a",) and plan.stop is not None and plan.stop.reason == TIME_BUDGET


def test_a_row_that_began_to_cruise_after_the_step_it_fails_in_ends_alone():
    driver = Driver(LIMITS)
    failing, other = lasting("a", num_prompt=5), lasting("b", num_prompt=5)
    driver.add(failing)
    driver.add(other)
    driver.plan()
    driver.plan()
    driver.commit()
    late = driver.plan()
    assert failing.cruise is not None and late.request_ids == ("a", "b")
    step = driver.flying[0]
    driver.scheduler.commit(step, StepResult(step.step, ((), (7,)), failed=(0,)), 0.0)
    driver.scheduler.check()
    driver.scheduler.commit(late, StepResult(late.step, ((7,), (8,))), 0.0)
    driver.scheduler.check()
    assert failing.reason == "error" and other.tokens[-2:] == [7, 8]

"""Where a model has stages, as many steps are in flight, and a row is in one of them for its next token."""

from __future__ import annotations

from typing import Any

import pytest
from support.toy import Driver, request

from slotwise.core.disciplines.disciplines import Chunked
from slotwise.core.reasons import MICRO_BATCH
from slotwise.core.record import RowKind
from slotwise.core.scheduler_limits import SchedulerLimits

LIMITS: dict[str, Any] = {
    "max_model_len": 64, "num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16}


def driver_of(stages: int, prompts: list[int], **limits: int) -> Driver:
    """Requests with prompts of so many tokens, none of which ends early."""
    driver = Driver(SchedulerLimits(**{**LIMITS, **limits, "stages": stages}), Chunked(0))
    for number, length in enumerate(prompts):
        driver.add(request(f"r{number}", [1 + number] * length, 20, min_tokens=20))
    return driver


@pytest.mark.parametrize("stages", [2, 3])
def test_decode_rows_are_divided_among_the_steps_in_flight(stages: int) -> None:
    driver = driver_of(stages, [1] * 6)
    driver.plan()
    driver.commit()
    plans = [driver.plan() for _ in range(stages)]
    rows = [name for plan in plans for name in plan.request_ids]
    assert sorted(rows) == [f"r{number}" for number in range(6)] and len({len(plan.slots) for plan in plans}) == 1
    for name in set(rows) - set(plans[-1].request_ids):
        assert dict(plans[-1].refused)[name] == MICRO_BATCH
    driver.commit()
    assert driver.plan().request_ids == plans[0].request_ids


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    driver = driver_of(3, [40])
    first, second, third = (driver.plan() for _ in range(3))
    assert [plan.starts for plan in (first, second, third)] == [(0,), (16,), (32,)]
    assert third.num_logits == (1,) and third.kinds == (RowKind.PREFILL,)


def test_a_step_that_would_have_no_rows_is_not_worth_planning() -> None:
    driver = driver_of(2, [1])
    assert driver.scheduler.can_plan_rows
    driver.plan()
    assert not driver.scheduler.can_plan_rows
    driver.commit()
    assert driver.scheduler.can_plan_rows


def test_no_more_steps_are_in_flight_than_there_are_stages() -> None:
    driver = driver_of(3, [40, 40, 40])
    for _ in range(3):
        driver.plan()
    with pytest.raises(RuntimeError, match="commit a step"):
        driver.plan()

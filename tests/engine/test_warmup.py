"""A handful of steps before anybody asks: on an executor that takes known times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.played import LIMITS, Clock, Timed, cost
from support.toy import Driver, alone, request

from slotwise.core.record import StepPlan, StepResult
from slotwise.core.step_time import Work, work_of
from slotwise.engine.warmup import OUTPUT, warmup

ROOMY = replace(LIMITS, max_model_len=200, num_blocks=200, max_num_seqs=20, max_num_batched_tokens=128)
TINY = replace(LIMITS, max_model_len=3, num_blocks=2, max_num_seqs=2, max_num_batched_tokens=2)


class Watched(Timed):
    """Remembers what it was given; breaks at a step, if asked to."""

    def __init__(self, limits, breaks_at: int = -1) -> None:
        self.clock = Clock()
        super().__init__(self.clock, limits.block_size)
        self.plans: list[StepPlan] = []
        self.breaks_at = breaks_at

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.plans.append(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if result.step == self.breaks_at:
            raise RuntimeError("no such kernel")
        return result

    @property
    def works(self) -> list[Work]:
        return [work_of(plan.starts, plan.counts) for plan in self.plans if plan.counts]


def test_few_rows_and_pieces_of_prompts_are_priced_afterwards() -> None:
    executor = Watched(ROOMY)
    times = warmup(executor, ROOMY, executor.clock)
    for starts, counts in ([10], [1]), ([9] * 4, [1] * 4), ([9] * 12, [1] * 12), ([0], [30]), ([0, 5, 5], [20, 1, 1]):
        work = work_of(starts, counts)
        assert times.typical(work) == pytest.approx(cost(work) * 1e-9, rel=0.15)


def test_small_steps_follow_large_ones_and_none_is_begun_when_time_is_up() -> None:
    executor = Watched(ROOMY)
    warmup(executor, ROOMY, executor.clock)
    works = executor.works
    assert works[0].tokens == 16 and max(work.rows for work in works) <= ROOMY.max_num_seqs
    learned = works[3:]
    assert learned[0].tokens == 1 and {work.rows for work in learned if not work.pairs} == {1, 4, 12}
    assert len(works) < OUTPUT, "nobody ends before the last of them"
    hurried = Watched(ROOMY)
    warmup(hurried, ROOMY, hurried.clock, seconds=sum(cost(work) for work in works[:5]) * 1e-9)
    assert 3 < len(hurried.works) <= 6
    assert hurried.works == works[: len(hurried.works)]


@pytest.mark.parametrize("breaks_at", [-1, 0, 3])
@pytest.mark.parametrize("limits", [ROOMY, TINY, replace(LIMITS, max_num_seqs=1)])
def test_whoever_serves_then_finds_all_slots_and_blocks_free(limits, breaks_at: int) -> None:
    """The fake executor asserts that no slot is taken twice and no row reads what another wrote."""
    executor = Watched(limits, breaks_at)
    warmup(executor, limits, executor.clock)
    executor.breaks_at = -1
    driver = Driver(limits)
    driver.executor = executor
    asked = [request(f"r{number}", [number + 1], 2) for number in range(limits.max_num_seqs)]
    for one in asked:
        driver.add(one)
    driver.run()
    assert driver.output == {one.request_id: alone(one, limits) for one in asked}


@pytest.mark.parametrize("breaks_at", [0, 1, 2, 3])
def test_nothing_is_learned_from_a_step_that_broke_or_was_the_first_of_all(breaks_at: int) -> None:
    executor = Watched(ROOMY, breaks_at)
    assert not warmup(executor, ROOMY, executor.clock).is_trained

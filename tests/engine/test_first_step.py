"""Steps before an engine says that it is ready: on executors that compute, fail and compute nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.played import LIMITS, Clock
from support.toy import next_token

from slotwise.core.record import StepPlan, StepResult
from slotwise.engine.executor import FakeExecutor
from slotwise.engine.warmup import PROMPT, FirstStepError, check_steps
from slotwise.errors import MOST_CHARACTERS


class Watched(FakeExecutor):
    """Remembers what it was given; `broken` names what goes wrong in the step that `at` counts."""

    def __init__(self, block_size: int, broken: str = "", at: int = 0) -> None:
        super().__init__(block_size, next_token)
        self.plans: list[StepPlan] = []
        self._broken = broken
        self._at = at

    def _is_due(self, broken: str) -> bool:
        return self._broken == broken and len(self.plans) == self._at + 1

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self._is_due("submit"):
            raise RuntimeError("the device is lost")
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        if self._is_due("collect"):
            raise ValueError("no such\nkernel " + "x" * 2000)
        return result._replace(tokens=((),), failed=(0,)) if self._is_due("logits") else result


def test_a_prompt_and_a_decode_step_run_and_nothing_is_left_of_them() -> None:
    limits = replace(LIMITS, block_size=32, max_model_len=64)
    executor = Watched(32)
    check_steps(executor, limits, Clock())
    assert [plan.counts for plan in executor.plans if plan.counts] == [(PROMPT,), (1,), (PROMPT,)]
    assert [join.spec.params.temperature for plan in executor.plans for join in plan.new_requests] == [0.0, 1.0]
    assert {slot for plan in executor.plans for slot in plan.slots} == {0}
    assert executor.plans[-1].released_slots == (0,)
    assert not executor._tokens and not executor._tables, "nothing is left of them"


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("broken", "told"), [
    ("submit", "RuntimeError: the device is lost"), ("collect", "ValueError: no such kernel xxx"),
    ("logits", "its logits are NaN or infinite")])
def test_what_goes_wrong_is_one_line(broken: str, told: str, at: int) -> None:
    with pytest.raises(FirstStepError) as caught:
        check_steps(Watched(32, broken, at), replace(LIMITS, block_size=32), Clock())
    message = str(caught.value)
    assert message.startswith(f"the first step failed: {told}") and "\n" not in message
    assert len(message) <= MOST_CHARACTERS


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17, 64])
@pytest.mark.parametrize("max_model_len", [1, 2, 3, 17, 18, 2048])
def test_a_step_is_run_however_small_the_limits_are(block_size: int, max_model_len: int) -> None:
    executor = Watched(block_size)
    check_steps(executor, replace(LIMITS, block_size=block_size, max_model_len=max_model_len, num_blocks=1), Clock())
    assert any(plan.counts for plan in executor.plans) == (max_model_len > 1), "no request runs in one token"

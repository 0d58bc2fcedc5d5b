"""Requests with equal beginnings: who asks, and a driver that sees what each of them found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slotwise.core import prefix_cache
from slotwise.core.record import StepPlan
from slotwise.core.request import Request
from slotwise.core.scheduler_limits import SchedulerLimits
from support.toy import Driver, alone, request

SYSTEM = list(range(12))  # three blocks


def limits(**changes: int) -> SchedulerLimits:
    numbers = {"max_model_len": 64, "num_blocks": 32, "block_size": 4, "max_num_seqs": 4,
               "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    return SchedulerLimits(**{**numbers, **changes})


def ask(name: str, prompt: list[int], max_tokens: int = 3, salt: str = "") -> Request:
    return request(name, prompt, max_tokens, ignore_eos=True, salt=salt)


class Watching(Driver):
    """Remembers how many tokens each request found."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.cached: dict[str, list[int]] = {}

    def plan(self) -> StepPlan:
        plan = super().plan()
        for admission in plan.admitted:
            self.cached.setdefault(admission.request_id, []).append(admission.num_cached)
        return plan


def check_against_each_alone(numbers: SchedulerLimits, prompts: list[tuple[list[int], str]]) -> None:
    driver = Watching(numbers)
    for index, (prompt, salt) in enumerate(prompts):
        driver.add(ask(f"r{index}", prompt, 3, salt))
        if index % 3 == 2:
            driver.plan()
            driver.commit()
    driver.run()
    for index, (prompt, salt) in enumerate(prompts):
        assert driver.output[f"r{index}"] == alone(ask("x", prompt, 3, salt), numbers)


FORGES = pytest.mark.parametrize("forge", [
    lambda content: 7, lambda content: content[0] % 3, lambda content: sum(content[1]) % 2])
"""Digests by which different blocks look alike."""


def use_digest(digest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have caches of prefixes that are made from here on believe in `digest`."""
    class Forged(prefix_cache.PrefixCache):
        def __init__(self, block_size: int, windows: Sequence[int]) -> None:
            super().__init__(block_size, windows, digest)

    monkeypatch.setattr("slotwise.core.kv_manager.PrefixCache", Forged)

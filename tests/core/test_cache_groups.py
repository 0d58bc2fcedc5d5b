"""Layers with a window hold what arithmetic predicts, and prefixes are found where every group still has its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.beginnings import Watching, ask, limits
from support.toy import Driver, alone, request

from slotwise.core.cache_groups import BlockTable, CacheGroups
from slotwise.core.prefix_cache import BlockHashes, Entry, PrefixCache
from slotwise.core.record import FREED, StepPlan, StepResult
from slotwise.core.scheduler_limits import SchedulerLimits

BLOCK = 16
GEMMA3_27B, GPT_OSS_20B = (1024, 10, 52), (128, 12, 12)  # window, layers with full attention, layers with a window


def peak(windows: Sequence[int], length: int, num_requests: int = 1) -> int:
    """The most blocks that are held at a time while sequences of `length` tokens are decoded from a short prompt."""
    driver = Driver(SchedulerLimits(
        max_model_len=length + 1, num_blocks=num_requests * len(windows) * (length // BLOCK + 1), block_size=BLOCK,
        max_num_seqs=num_requests, max_num_batched_tokens=64, windows=tuple(windows), max_chunk=64))
    driver.executor = Counted(windows)
    for number in range(num_requests):
        driver.add(request(f"r{number}", [number + 1] * 8, length - 8, ignore_eos=True))
    held = 0
    while driver.scheduler.has_work:
        driver.plan()
        held = max(held, driver.limits.num_blocks - driver.scheduler.num_free_blocks)
        driver.commit()
    return held


class Counted:
    """An executor that samples token 5 whatever the context: contexts are long here."""

    def __init__(self, windows: Sequence[int]) -> None:
        self._results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        self._results.append(StepResult(plan.step, tuple((5,) * (wanted > 0) for wanted in plan.num_logits)))

    def collect(self) -> StepResult:
        return self._results.pop(0)


@pytest.mark.parametrize(("window", "full", "windowed"), [GEMMA3_27B, GPT_OSS_20B], ids=["gemma3", "gpt_oss"])
def test_windows_save_what_arithmetic_predicts(window, full, windowed):
    """Within 5 %: a layer with a window holds its tokens instead of all."""
    length = 2048
    of_full, of_window = peak([0], length), peak([window], length)
    held = full * of_full + windowed * of_window
    saved = 1 - held / ((full + windowed) * of_full)
    predicted = windowed / (full + windowed) * (1 - window / length)
    assert saved == pytest.approx(predicted, rel=0.05)
    assert peak([0, window], length) == of_full + of_window, "both groups together hold what each holds alone"


def test_more_requests_run_in_the_same_memory():
    length, window = 512, 64
    pool = 4 * 2 * (length // BLOCK + 1)  # of two groups: four sequences without windows

    def most_running(windows: tuple[int, ...]) -> int:
        driver = Driver(SchedulerLimits(
            max_model_len=length + 1, num_blocks=pool, block_size=BLOCK, max_num_seqs=16, max_num_batched_tokens=8192,
            windows=windows, max_chunk=16))
        driver.executor = Counted(windows)
        for number in range(16):
            driver.add(request(f"r{number}", [number + 1] * (length - 16), 16, ignore_eos=True))
        most = 0
        while driver.scheduler.has_work:
            driver.plan()
            most = max(most, driver.scheduler.num_running)
            driver.commit()
        assert len(driver.ended) == 16
        return most

    assert most_running((0, 0)) == 4
    assert most_running((0, window)) >= 6, "a sequence holds 33 + 4 + 2 * 1 + 1 blocks at most, where it held 66"


def test_a_window_keeps_what_later_positions_see():
    groups = CacheGroups((0, 10), block_size=4, max_chunk=4)
    assert [groups.firsts(computed) for computed in (0, 3, 4, 9)] == [[0, 0], [0, 0], [0, 1], [0, 6]]
    assert groups.ends(0, 100) == [100, 3 + 2 + 1], "window, two steps in flight, and one begun"
    assert groups.most_blocks(400) == 106 and groups.longest(106, 1000) == 400


def test_a_prefix_is_usable_where_each_group_has_what_it_reads():
    cache = PrefixCache(2, windows=(1 << 62, 2))
    tokens, hashes = list(range(12)), BlockHashes("")
    tables = BlockTable(0, list(range(6))), BlockTable(0, list(range(10, 16)))
    for end in (1, 4, 6):
        assert cache.publish(hashes, tokens, tables, end) == [] and hashes.length == end

    def found() -> list[Entry]:
        return cache.match(BlockHashes(""), tokens, len(tokens), max_loads=0)

    assert len(found()) == 6
    cache.vacate(10)  # of the second group, and behind its window from block 3 on
    assert len(found()) == 6
    cache.vacate(14)
    assert len(found()) == 4, "blocks 2 and 3 are there: what follows lacks block 4"
    cache.vacate(13)
    assert len(found()) == 3
    cache.vacate(1)  # of full attention
    assert found() == [], "a prefix of one block lacks block 0 of the second group"


def test_a_long_prefix_is_found_after_its_windows_slid():
    driver = Watching(limits(num_blocks=100, windows=(0, 8), max_chunk=8))
    prompt = [number % 20 for number in range(41)]
    for name in "ab":
        driver.add(ask(name, prompt))
        driver.run()
        assert driver.output[name] == alone(ask("x", prompt), driver.limits)
    assert driver.cached == {"a": [0], "b": [40]}
    joined = next(plan for plan in reversed(driver.plans) if plan.new_requests)
    full, windowed = joined.new_blocks
    assert len(full.blocks) == len(windowed.blocks) == 11
    assert windowed.blocks[:8] == (FREED,) * 8 and FREED not in windowed.blocks[8:] and FREED not in full.blocks
    assert any(plan.expired_blocks for plan in driver.plans)

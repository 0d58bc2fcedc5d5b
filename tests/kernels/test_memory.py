"""Memory that is asked for before it is written."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from slotwise.kernels.cpu.cache import CpuCache
from slotwise.kernels.cpu.memory import LARGE, populate
from slotwise.kernels.interface import AttentionShape

SHAPE = AttentionShape(num_heads=8, num_kv_heads=4, head_dim=64, scale=1.0)


def resident(address: int) -> int:
    """Bytes in memory, of the mapping in which `address` lies."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in mapping.split()[0].split("-"))
        if start <= address < end:
            return 1024 * int(re.search(r"Rss: +(\d+) kB", mapping)[1])
    raise AssertionError(f"nothing is mapped at {address}")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_memory_is_taken_for_the_blocks_asked_for_and_what_they_hold_stays():
    cache = CpuCache.allocate(1000, 64, SHAPE, torch.bfloat16)
    per_block = cache.storage[0].nbytes
    cache.storage[7] = 3
    before = resident(cache.address)
    if not cache.touch(0, 500):
        pytest.skip("this system cannot be asked for memory ahead")
    assert before <= 2 * LARGE and 500 * per_block <= resident(cache.address) <= 500 * per_block + 2 * LARGE
    assert (cache.storage[7] == 3).all() and not cache.storage[:7].any() and not cache.storage[8:].any()


def test_a_system_that_refuses_is_no_failure():
    assert not populate(mmap.PAGESIZE, mmap.PAGESIZE)  # where nothing is mapped

"""Memory that is asked for before it is written."""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
from pathlib import Path

import pytest
import torch

from slotwise.compute.kernels.cpu.cache import CpuCache
from slotwise.compute.kernels.cpu.memory import LARGE, WEIGHTS_AT_ONCE, HugePages, keep_freed, populate
from slotwise.compute.kernels.interface import AttentionShape

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
    per_block, others = cache.storage[0].nbytes, resident(cache.address)  # the system may join mappings side by side
    cache.storage[7] = 3
    before = resident(cache.address) - others
    if not cache.touch(0, 500):
        pytest.skip("this system cannot be asked for memory ahead")
    taken = resident(cache.address) - others
    assert before <= 2 * LARGE and 500 * per_block <= taken <= 500 * per_block + 2 * LARGE
    assert (cache.storage[7] == 3).all() and not cache.storage[:7].any() and not cache.storage[8:].any()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_what_is_given_back_takes_no_memory_and_is_zeros_again():
    cache = CpuCache.allocate(1000, 64, SHAPE, torch.bfloat16)
    others = resident(cache.address)
    cache.storage.fill_(3)
    assert resident(cache.address) - others >= 0.9 * cache.storage.nbytes
    cache.give_back()
    assert resident(cache.address) - others <= 2 * LARGE
    assert not cache.storage.any()
    cache.storage[999] = 5
    assert (cache.storage[999] == 5).all()


def test_a_system_that_refuses_is_no_failure():
    assert not populate(mmap.PAGESIZE, mmap.PAGESIZE)  # where nothing is mapped


def test_tensors_in_huge_pages_are_copies_that_lie_side_by_side() -> None:
    pages = HugePages()
    tensors = [torch.randn(33, 7), torch.arange(5, dtype=torch.uint8), torch.randn(3, 64).bfloat16().t()]
    copies = [pages.copy(tensor) for tensor in tensors]
    assert all(torch.equal(copy, tensor) and copy.is_contiguous() for copy, tensor in zip(copies, tensors, strict=True))
    places = [copy.data_ptr() for copy in copies]
    assert all(place % 64 == 0 for place in places)
    assert [place - places[0] for place in places] == [0, 960, 1024]  # 924 and 5 bytes, in whole cache lines


def test_a_tensor_larger_than_what_is_left_gets_pages_of_its_own_size() -> None:
    pages, large = HugePages(), torch.ones(WEIGHTS_AT_ONCE + 1, dtype=torch.uint8)
    first, second = pages.copy(torch.ones(3)), pages.copy(large)
    assert torch.equal(second, large)
    assert torch.equal(first, torch.ones(3))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU C library")
def test_freed_memory_is_used_again_without_page_faults():
    keep_freed()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(3 << 20, dtype=torch.uint8) for _ in range(3)]
        del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(5)) < 400  # the tensors have 2,304 pages

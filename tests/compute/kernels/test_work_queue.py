"""Queues of a kernel's work: everything is taken once, whoever comes when, and a thread knows what is next."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cfunc

from slotwise.compute.kernels.cpu.launcher import HEADER
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.simd import INT64, load, store
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, upcoming


def _take_turns(words, threads, items, order, turns, expected, taken):
    for turn in range(turns):
        thread = load(order, turn, INT64)
        store(expected, turn, upcoming(words, thread, threads, items), INT64)
        store(taken, turn, pop(words, thread, threads, items), INT64)


@pytest.fixture(scope="module")
def take_turns():
    code = cfunc("void(int64, int64, int64, int64, int64, int64, int64)", nopython=True)(_take_turns)

    def run(threads: int, items: int, order: list[int]) -> tuple[list[int], list[int]]:
        """What each turn's thread was told it would take next, and what it took."""
        _counters, address = aligned(HEADER, np.int64)
        threads_in_order = np.array(order, np.int64)
        expected, taken = np.zeros((2, len(order)), np.int64)
        code.ctypes(address, threads, items, threads_in_order.ctypes.data, len(order), expected.ctypes.data,
                    taken.ctypes.data)
        return expected.tolist(), taken.tolist()

    return run


@given(data=st.data(), threads=st.integers(1, 15), items=st.integers(0, 40))
def test_everything_is_taken_once_and_as_was_expected(take_turns, data, threads, items):
    order = data.draw(st.lists(st.integers(0, threads - 1), min_size=items, max_size=items), label="order")
    last = data.draw(st.integers(0, threads - 1), label="who comes when all is taken")
    expected, taken = take_turns(threads, items, [*order, last])
    assert sorted(taken) == sorted([NOTHING, *range(items)]) and taken[-1] == NOTHING
    assert all(told in (NOTHING, got) for told, got in zip(expected, taken, strict=True))


def test_threads_begin_with_neighbors_and_then_help(take_turns):
    expected, taken = take_turns(2, 7, [1, 1, 0, 1, 1, 1, 1, 1])
    assert taken == [3, 4, 0, 5, 6, 1, 2, NOTHING]
    assert expected == [3, 4, 0, 5, 6, NOTHING, NOTHING, NOTHING]

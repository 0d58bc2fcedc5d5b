"""Slots: the batch indices of running requests, and those released since the last plan."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Slots:
    """Allocates the lowest free slot first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))  # a heap
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pop(self) -> int:
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)
        self._released.append(slot)

    def pop_released(self) -> tuple[int, ...]:
        """Slots released since the last call."""
        released_slots, self._released = tuple(self._released), []
        return released_slots

    def check(self, taken: Iterable[int]) -> None:
        """Check that each slot is either taken or free.  Raises AssertionError."""
        assert sorted([*taken, *self._free]) == list(range(self.total))

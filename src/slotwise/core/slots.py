"""Slots: the places of a batch, and who has left one since the executor was last told."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class Slots:
    """The lowest free number is given out first."""

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
        """Those given back since the last call."""
        released_slots, self._released = tuple(self._released), []
        return released_slots

    def check(self, taken: Iterable[int]) -> None:
        """Each slot is either taken or free.  Raises AssertionError."""
        assert sorted([*taken, *self._free]) == list(range(self.total))

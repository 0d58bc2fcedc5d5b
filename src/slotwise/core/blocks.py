"""The pool of cache blocks: who holds how many references to which, and which are free.

A block is a place for `block_size` tokens in every layer's cache.  Blocks are numbers here; the memory behind them
belongs to the runner.  After Kwon et al., "PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ConservationError(AssertionError):
    """Blocks were lost or counted twice: a bug, never a client's fault."""


class BlockPool:
    """Free blocks in the order they came back (least recently used first), and references to the others."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = deque(range(total))
        self._references = [0] * total

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with one reference.  The caller has looked at `num_free`."""
        free, references = self._free, self._references
        blocks = [free.popleft() for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, which are in use."""
        for block in blocks:
            if not self._references[block]:
                raise ConservationError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those that nobody holds any more are free."""
        references = self._references
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                self._free.append(block)
            elif references[block] < 0:
                raise ConservationError(f"block {block} was given back twice")

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Law 4: free + referenced == total, and each reference has a holder.

        Args:
            holders: the block tables of all requests that hold any.

        Raises:
            ConservationError: naming the first block that is lost, free while held, or miscounted.
        """
        held = [0] * self.total
        for blocks in holders:
            for block in blocks:
                held[block] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise ConservationError("a block is free twice")
        for block, (expected, counted) in enumerate(zip(held, self._references, strict=True)):
            if expected != counted or (counted == 0) != (block in free):
                raise ConservationError(
                    f"block {block}: {expected} holders, {counted} references, {'free' if block in free else 'in use'}")

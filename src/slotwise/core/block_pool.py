"""Block pool of the KV cache: free blocks, cached blocks in an order of eviction, and reference counts of the others.

A block holds `block_size` tokens in every layer's cache.  Blocks are numbers here; the runner owns the memory.  After
Kwon et al., "PagedAttention" (SOSP 2023).

    free ──pop──► referenced ──release──► free
                      ▲  │
                share │  └──release, published──► cached ──evict──► free
                      └────────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from slotwise.core.eviction import EvictionOrder, LeastRecentlyUsed


class ConservationError(AssertionError):
    """Blocks were lost or counted twice: a bug, never a client's fault."""


class BlockPool:
    """Free blocks in the order of release, cached blocks in an order of eviction, and reference counts.

    Args:
        is_published: whether the prefix cache can find the block, so that it is kept when its last reference goes.
    """

    def __init__(self, total: int, is_published: Callable[[int], bool] = lambda block: False) -> None:
        self.total = total
        self._is_published = is_published
        self._free = deque(range(total))
        self.cached: EvictionOrder = LeastRecentlyUsed()
        self._references = [0] * total

    @property
    def num_free(self) -> int:
        """Number of free blocks, without cached ones."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of blocks without references: free and cached."""
        return len(self._free) + len(self.cached)

    def pop(self, count: int) -> list[int]:
        """Returns `count` free blocks, each with one reference.  The caller has checked `num_free`."""
        free, references = self._free, self._references
        blocks = [free.popleft() for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which are referenced or cached."""
        for block in blocks:
            if not self._references[block]:
                if block not in self.cached:
                    raise ConservationError(f"block {block} is free and cannot be shared")
                self.cached.remove(block)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; those without references become free or cached."""
        references, add = self._references, self.cached.add
        for block in blocks:
            references[block] -= 1
            if references[block] == 0:
                if self._is_published(block):
                    add(block)
                else:
                    self._free.append(block)
            elif references[block] < 0:
                raise ConservationError(f"block {block} was given back twice")

    def num_freed(self, dropped: Mapping[int, int]) -> int:
        """Returns how many blocks would lose their last reference if `dropped`, by block, were dropped."""
        return sum(self._references[block] == count for block, count in dropped.items())

    def is_cached(self, block: int) -> bool:
        """Whether `block` is cached: published and without references."""
        return block in self.cached

    def evict(self, count: int) -> list[int]:
        """Free up to `count` cached blocks, in their order; the caller unmaps them in the prefix cache."""
        pop = self.cached.pop
        blocks = [pop() for _ in range(min(count, len(self.cached)))]
        self._free.extend(blocks)
        return blocks

    def use_again(self, blocks: Iterable[int]) -> None:
        """Move the cached ones of `blocks` to where blocks released now would be."""
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
                self.cached.add(block)

    def order_by(self, order: EvictionOrder) -> None:
        """Move the cached blocks to another order, which is empty."""
        for _ in range(len(self.cached)):
            order.add(self.cached.pop())
        self.cached = order

    def discard(self, block: int) -> None:
        """Free `block` if it is cached: its contents can no longer be found."""
        if block in self.cached:
            self.cached.remove(block)
            self._free.append(block)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Check that free + referenced + cached == total, and each reference has a holder.

        Args:
            holders: the block tables of all requests with blocks.

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
            places = (block in free) + (block in self.cached) + (counted > 0)
            if expected != counted or places != 1:
                raise ConservationError(
                    f"block {block}: {expected} holders, {counted} references, {'free, ' if block in free else ''}"
                    f"{'cached' if block in self.cached else 'not cached'}")
            if block in self.cached and not self._is_published(block):
                raise ConservationError(f"block {block} is kept and can never be found")

"""Host-memory tier of the prefix cache.  Holds blocks evicted from the device pool.

A host block is a number here, like a device block; the runner owns the memory.  The plan lists the copies: saves run
before loads, and both before the forward pass.  So the plan that saves a device block may reallocate it, and the plan
that loads one may read it.

    device   cached ──evicted──► reallocated      allocated ────► cached, shared
                        │ save                        ▲ load
    host     free ──► kept ───────────hold──────► loading ──plan is closed──► kept, as the most recently used
               ▲        │
               └──drop──┘ the first in the order of eviction, to save another

`--eviction-policy` sets the order of both tiers (`core/eviction.py`).  A loaded block stays on the host, and is never
written there: its next eviction from the device needs no copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slotwise.core.block_pool import ConservationError
from slotwise.core.eviction import EvictionOrder, LeastRecentlyUsed
from slotwise.core.prefix_cache import NOWHERE, CachedBlock, Entry
from slotwise.core.record import Copy


class Copies(NamedTuple):
    """The block copies of one plan."""

    saves: tuple[Copy, ...]  # from a device block to a host block
    loads: tuple[Copy, ...]  # from a host block to a device block


NO_COPIES = Copies((), ())


class HostCache:
    """Maps host blocks to cached blocks of the groups, and collects the copies of the plan under construction.

    Args:
        total: number of host blocks; with 0 evicted blocks are lost.
        max_loads: blocks that one plan may load.
    """

    def __init__(self, total: int, max_loads: int) -> None:
        self.total = total
        self.max_loads = max_loads
        self._free = deque(range(total))
        self._kept: dict[int, CachedBlock] = {}  # by host block
        self.order: EvictionOrder = LeastRecentlyUsed()  # of those kept
        self._loading: dict[int, CachedBlock] = {}  # by host block; read by this plan, so not to be written
        self._saves: dict[int, int] = {}  # device block by host block; of two saves to one host block the last counts
        self._loads: list[Copy] = []

    @property
    def num_loads_left(self) -> int:
        """Number of blocks that this plan may still load."""
        return self.max_loads - len(self._loads)

    def content(self, host_block: int) -> CachedBlock:
        """Returns what a kept host block holds."""
        return self._kept[host_block]

    def order_by(self, order: EvictionOrder) -> None:
        """Move the kept blocks to another order, which is empty."""
        for _ in range(len(self.order)):
            order.add(self.order.pop())
        self.order = order

    def keep(self, cached: CachedBlock, block: int) -> CachedBlock | None:
        """Save `cached`, whose device `block` is about to be reallocated.

        Returns what lost its host block for it: the first in the order, or `cached` itself if none is free.
        """
        if cached.host_block in self._loading:  # a request lost its blocks in the plan that was to load them
            self._put(self._loading.pop(cached.host_block))
            self._loads = [copy for copy in self._loads if copy.target != block]
            return None
        if cached.host_block != NOWHERE:
            self.order.remove(cached.host_block)
            self.order.add(cached.host_block)
            return None
        lost = None
        if not self._free:
            if not self._kept:
                self.order.forget(cached)
                return cached
            lost = self._kept.pop(self.order.pop())
            self._free.append(lost.host_block)
            lost.host_block = NOWHERE
        cached.host_block = self._free.popleft()
        self._put(cached)
        self._saves[cached.host_block] = block
        return lost

    def drop(self, cached: CachedBlock) -> None:
        """Free the host block of `cached`, if it has one."""
        if cached.host_block != NOWHERE:
            self.order.forget(cached)
            self._take(cached)
            self._free.append(cached.host_block)
            cached.host_block = NOWHERE

    def hold(self, blocks: Sequence[CachedBlock]) -> None:
        """Protect the host blocks of `blocks`, which this plan will load."""
        for cached in blocks:
            self._take(cached)
            self._loading[cached.host_block] = cached

    def load(self, cached: CachedBlock, block: int) -> None:
        """Copy `cached`, which is held, into device block `block`."""
        self._loads.append(Copy(cached.host_block, block))

    def pop_copies(self) -> Copies:
        """Returns the copies of the closed plan.  Loaded prefixes will be evicted after their continuations."""
        if not (self._saves or self._loading):
            return NO_COPIES
        copies = Copies(tuple([Copy(block, host_block) for host_block, block in self._saves.items()]),
                        tuple(self._loads))
        for cached in reversed(self._loading.values()):
            self._put(cached)
        self._loading.clear()
        self._saves.clear()
        self._loads.clear()
        return copies

    def _put(self, cached: CachedBlock) -> None:
        self._kept[cached.host_block] = cached
        self.order.add(cached.host_block)

    def _take(self, cached: CachedBlock) -> None:
        self.order.remove(cached.host_block)
        del self._kept[cached.host_block]

    def check(self, is_known: Callable[[Entry], bool]) -> None:
        """Check between two plans: free + kept == total, and every kept block's entry can be found.

        Raises:
            ConservationError: naming what is wrong.
        """
        host_blocks = [*self._free, *self._kept]
        if sorted(host_blocks) != list(range(self.total)):
            raise ConservationError(f"{len(self._free)} host blocks free and {len(self._kept)} kept, of {self.total}")
        if len(self.order) != len(self._kept):
            raise ConservationError(f"{len(self.order)} host blocks have an order, of {len(self._kept)} kept")
        for host_block, cached in self._kept.items():
            if cached.host_block != host_block or not is_known(cached.entry):
                raise ConservationError(f"host block {host_block} is kept and can never be found")

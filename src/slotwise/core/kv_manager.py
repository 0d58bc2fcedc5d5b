"""Block tables: the cache blocks that hold each request's keys and values.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           capacity: 48 tokens
                 cached           cached         allocated     the first 32 tokens are shared with another request

A prefix found only in host memory (`core/host_cache.py`) needs a device block, too, into which the plan loads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from slotwise.core.block_pool import BlockPool, ConservationError
from slotwise.core.host_cache import HostCache
from slotwise.core.prefix_cache import NOWHERE, Entry, PrefixCache
from slotwise.core.request import Request
from slotwise.core.step import CACHE_GROUP, FreedBlocks

NEVER_PUBLISHED = 1 << 62  # tokens


class Allocation(NamedTuple):
    """Blocks for a waiting request: the cached prefix, and how many blocks must be allocated."""

    found: list[Entry]  # cached prefix, in order
    on_host: list[Entry]  # the entries of `found` that are only in host memory
    num_missing: int


class KVManager:
    """Allocates the pool's blocks to requests.  Only this class changes `Request.blocks`.

    Args:
        host: host-memory tier for evicted blocks.
        shares: enables prefix caching.
    """

    def __init__(self, num_blocks: int, block_size: int, host: HostCache, *, shares: bool) -> None:
        self.host = host
        self.prefix = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self.prefix.has)
        self.block_size = block_size
        self._shares = shares
        self._freed: dict[int, int] = {}  # by slot: blocks truncated since the last plan

    def find(self, request: Request, num_tokens: int, spare: int) -> Allocation | None:
        """Returns blocks for `num_tokens` tokens of a request without blocks, leaving `spare` free; None: too few.

        The cached prefix ends before the last known token, which must be computed to sample the next one.
        """
        allocation = self.match(request, num_tokens)
        return None if self._num_lacking(allocation) + spare > 0 else allocation

    def missing(self, allocation: Allocation, leaving: Iterable[Request]) -> int:
        """Blocks to be freed before `allocation` fits once the requests `leaving` have left; below 1: it fits.

        A block that another request shares, or that the allocation contains, is not freed by a request that leaves.
        """
        kept = {entry.block for entry in allocation.found}
        dropped = Counter(block for request in leaving for block in request.blocks if block not in kept)
        return self._num_lacking(allocation) - self.pool.num_freed(dropped)

    def _num_lacking(self, allocation: Allocation) -> int:
        idle = sum(self.pool.is_cached(entry.block) for entry in allocation.found)
        return allocation.num_missing - (self.pool.num_available - idle)

    def match(self, request: Request, num_tokens: int) -> Allocation:
        """Returns what `num_tokens` tokens of a request without blocks need; of a prefix in host memory no more than
        one plan may load.
        """
        computes_all = request.wants_prompt and not request.num_output
        found = [] if computes_all or not self._shares else self.prefix.match(
            request.block_hashes, request.tokens, len(request.tokens) - 1)
        on_host = [index for index, entry in enumerate(found) if entry.block == NOWHERE]
        if len(on_host) > self.host.max_loads:
            del found[on_host[self.host.max_loads] :], on_host[self.host.max_loads :]
        missing = -(-num_tokens // self.block_size) - len(found) + len(on_host)
        return Allocation(found, [found[index] for index in on_host], missing)

    def allocate(self, request: Request, allocation: Allocation) -> int:
        """Set the block table of `request`.  Returns its cached tokens, including those the plan will load."""
        found, on_host = allocation.found, allocation.on_host
        self.pool.share(entry.block for entry in found if entry.block != NOWHERE)
        self.host.hold(on_host)  # evictions below may save to the host, but not to these blocks
        taken = self._pop_blocks(allocation.num_missing)
        for entry, block in zip(on_host, taken, strict=False):
            self.host.load(entry, block)
            self.prefix.put(entry, block)
        request.blocks = [entry.block for entry in found] + taken[len(on_host) :]
        request.num_reserved = len(request.blocks)
        request.capacity = request.num_reserved * self.block_size
        block_hashes = request.block_hashes
        block_hashes.length = len(found)
        block_hashes.before = found[-1] if found else block_hashes.salt
        self._set_publish_at(request)
        return len(found) * self.block_size

    def largest_capacity(self, request: Request, spare: int) -> int:
        """Tokens that fit the blocks of `request` and all available ones but `spare`."""
        return request.capacity + max(0, self.pool.num_available - spare) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Append blocks up to a capacity of `num_tokens` tokens.  Returns them; None, and no change, if too few."""
        missing = max(0, -(-num_tokens // self.block_size) - len(request.blocks))
        if missing > self.pool.num_available:
            return None
        blocks = self._pop_blocks(missing)
        request.blocks.extend(blocks)
        request.capacity += len(blocks) * self.block_size
        return tuple(blocks)

    def truncate(self, request: Request) -> None:
        """Free the blocks behind the computed tokens: the drafts in them were not accepted, or none are in them.

        The blocks of its admission stay.  None of the freed ones is published: published blocks are computed.
        """
        num_kept = max(-(-request.num_computed // self.block_size), request.num_reserved)
        freed = request.blocks[num_kept:]
        if freed:
            del request.blocks[num_kept:]
            request.capacity = num_kept * self.block_size
            self.pool.release(reversed(freed))
            self._freed[request.slot] = self._freed.get(request.slot, 0) + len(freed)

    def pop_freed(self) -> tuple[FreedBlocks, ...]:
        """Blocks truncated since the last call, of requests that still hold their slots."""
        if not self._freed:
            return ()
        freed, self._freed = self._freed, {}
        return tuple([FreedBlocks(slot, CACHE_GROUP, count) for slot, count in freed.items()])

    def publish(self, request: Request) -> None:
        """Add the full computed blocks of `request` to the prefix cache."""
        block_hashes = request.block_hashes
        while (block_hashes.length + 1) * self.block_size <= request.num_computed:
            replaced = self.prefix.publish(block_hashes, request.tokens, request.blocks[block_hashes.length])
            if replaced is not None:
                self.pool.discard(replaced.block)
                self.host.drop(replaced)
        self._set_publish_at(request)

    def release(self, request: Request) -> None:
        """Release all blocks, the last one first: a prefix is evicted after its continuation."""
        self.pool.release(reversed(request.blocks))
        self._freed.pop(request.slot, None)
        request.blocks = []
        request.capacity = 0
        request.block_hashes.rewind()

    def check(self, requests: Iterable[Request]) -> None:
        """Check conservation of blocks over all unfinished `requests`.  Raises ConservationError."""
        unfinished = list(requests)
        self.pool.check(request.blocks for request in unfinished)
        self.host.check(self.prefix.has_entry)
        for request in unfinished:
            if request.block_hashes.length * self.block_size > request.num_computed:
                raise ConservationError(f"{request.request_id} has published what it has not computed")

    def _pop_blocks(self, count: int) -> list[int]:
        for block in self.pool.evict(max(0, count - self.pool.num_free)):
            lost = self.host.keep(self.prefix.vacate(block), block)
            if lost is not None and lost.block == NOWHERE:
                self.prefix.forget(lost)
        return self.pool.pop(count)

    def _set_publish_at(self, request: Request) -> None:
        request.publish_at = (request.block_hashes.length + 1) * self.block_size if self._shares else NEVER_PUBLISHED

"""Block tables: which blocks hold a request's keys and values.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           room up to token 47
                 found            found          taken         by another request that began with the same 32 tokens

What was found in host memory alone (`core/host_cache.py`) needs a block, too, into which the plan loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from slotwise.core.block_pool import BlockPool, ConservationError
from slotwise.core.host_cache import HostCache
from slotwise.core.prefix_cache import NOWHERE, Entry, PrefixCache
from slotwise.core.request import Request

NEVER_PUBLISHED = 1 << 62  # tokens


class Allocation(NamedTuple):
    """Room for a request that waits: what was found, and how many blocks must be taken beside those of the device."""

    found: list[Entry]
    on_host: list[Entry]  # those of the found that are in host memory alone
    num_missing: int


class KVManager:
    """Hands out the pool's blocks to requests.  `Request.blocks` is changed nowhere else.

    Args:
        host: keeps what is evicted.
        shares: whether equal beginnings share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, host: HostCache, *, shares: bool) -> None:
        self.host = host
        self.prefix = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self.prefix.has)
        self.block_size = block_size
        self._shares = shares

    def find(self, request: Request, num_tokens: int, spare: int) -> Allocation | None:
        """Room for `num_tokens` tokens of a request that holds no blocks, leaving `spare` blocks; None: there is none.

        Of the known tokens at least one is left to compute, for somebody must yield the next one.
        """
        allocation = self._match(request, num_tokens)
        return None if self._num_lacking(allocation) + spare > 0 else allocation

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that would have to come free for `num_tokens` tokens of one that holds none; less than 1: none."""
        return self._num_lacking(self._match(request, num_tokens))

    def _num_lacking(self, allocation: Allocation) -> int:
        idle = sum(self.pool.is_cached(entry.block) for entry in allocation.found)
        return allocation.num_missing - (self.pool.num_available - idle)

    def _match(self, request: Request, num_tokens: int) -> Allocation:
        """As much of its beginning as was found and one plan may load."""
        found = self.prefix.match(request.block_hashes, request.tokens, len(request.tokens) - 1) if self._shares else []
        on_host = [index for index, entry in enumerate(found) if entry.block == NOWHERE]
        if len(on_host) > self.host.max_loads:
            del found[on_host[self.host.max_loads] :], on_host[self.host.max_loads :]
        missing = -(-num_tokens // self.block_size) - len(found) + len(on_host)
        return Allocation(found, [found[index] for index in on_host], missing)

    def allocate(self, request: Request, allocation: Allocation) -> int:
        """Give `request` its blocks: how many of its tokens they hold, or will when they are loaded."""
        found, on_host = allocation.found, allocation.on_host
        self.pool.share(entry.block for entry in found if entry.block != NOWHERE)
        self.host.hold(on_host)  # what is taken may be saved, and must not be saved there
        taken = self._pop_blocks(allocation.num_missing)
        for entry, block in zip(on_host, taken, strict=False):
            self.host.load(entry, block)
            self.prefix.put(entry, block)
        request.blocks = [entry.block for entry in found] + taken[len(on_host) :]
        request.capacity = len(request.blocks) * self.block_size
        block_hashes = request.block_hashes
        block_hashes.length = len(found)
        block_hashes.before = found[-1] if found else block_hashes.salt
        self._set_publish_at(request)
        return len(found) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all: the blocks appended; None, and no change, when there is none."""
        missing = max(0, -(-num_tokens // self.block_size) - len(request.blocks))
        if missing > self.pool.num_available:
            return None
        blocks = self._pop_blocks(missing)
        request.blocks.extend(blocks)
        request.capacity += len(blocks) * self.block_size
        return tuple(blocks)

    def publish(self, request: Request) -> None:
        """Let others find the blocks that `request` has computed to their ends."""
        block_hashes = request.block_hashes
        while (block_hashes.length + 1) * self.block_size <= request.num_computed:
            replaced = self.prefix.publish(block_hashes, request.tokens, request.blocks[block_hashes.length])
            if replaced is not None:
                self.pool.discard(replaced.block)
                self.host.drop(replaced)
        self._set_publish_at(request)

    def release(self, request: Request) -> None:
        """Give back all blocks, last one first, so that a beginning outlives its continuation."""
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.capacity = 0
        request.block_hashes.rewind()

    def check(self, requests: Iterable[Request]) -> None:
        """Conservation of blocks; `requests` are all that live.  Raises ConservationError."""
        unfinished = list(requests)
        self.pool.check(request.blocks for request in unfinished)
        self.host.check(self.prefix.knows)
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

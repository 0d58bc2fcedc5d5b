"""Block tables: which blocks hold a request's keys and values.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           room up to token 47
                 found            found          taken         by another request that began with the same 32 tokens
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from slotwise.core.blocks import BlockPool, ConservationError
from slotwise.core.prefix import Entry, PrefixCache
from slotwise.core.request import Request

NEVER_PUBLISHED = 1 << 62  # tokens


class Seat(NamedTuple):
    """Room for a request that waits: blocks found, and how many must be taken beside them."""

    found: list[Entry]
    num_missing: int


class BlockTables:
    """Hands out the pool's blocks to requests.  `Request.blocks` is changed nowhere else.

    Args:
        shares: whether equal beginnings share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, shares: bool) -> None:
        self.prefix = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self.prefix.has)
        self.block_size = block_size
        self._shares = shares

    def find(self, request: Request, num_tokens: int, spare: int) -> Seat | None:
        """Room for `num_tokens` tokens of a request that holds no blocks, leaving `spare` blocks; None: there is none.

        Of the known tokens at least one is left to compute, for somebody must yield the next one.
        """
        found = self._found(request)
        if self._lacking(found, num_tokens) + spare > 0:
            return None
        return Seat(found, -(-num_tokens // self.block_size) - len(found))

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that would have to come free for `num_tokens` tokens of one that holds none; less than 1: none."""
        return self._lacking(self._found(request), num_tokens)

    def _lacking(self, found: list[Entry], num_tokens: int) -> int:
        idle = sum(self.pool.is_cached(entry.block) for entry in found)
        return -(-num_tokens // self.block_size) - len(found) - (self.pool.num_available - idle)

    def _found(self, request: Request) -> list[Entry]:
        if not self._shares:
            return []
        return self.prefix.match(request.trail, request.tokens, len(request.tokens) - 1)

    def seat(self, request: Request, seat: Seat) -> int:
        """Give `request` its blocks: how many of its tokens they hold already."""
        shared = [entry.block for entry in seat.found]
        self.pool.share(shared)
        request.blocks = shared + self._take(seat.num_missing)
        request.give_room(len(request.blocks) * self.block_size)
        trail = request.trail
        trail.length = len(shared)
        trail.before = seat.found[-1] if seat.found else trail.salt
        self._expect(request)
        return len(shared) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all: the blocks appended; None, and no change, when there is none."""
        missing = max(0, -(-num_tokens // self.block_size) - len(request.blocks))
        if missing > self.pool.num_available:
            return None
        blocks = self._take(missing)
        request.blocks.extend(blocks)
        request.give_room(request.room + len(blocks) * self.block_size)
        return tuple(blocks)

    def publish(self, request: Request) -> None:
        """Let others find the blocks that `request` has computed to their ends."""
        trail = request.trail
        while (trail.length + 1) * self.block_size <= request.num_computed:
            for block in self.prefix.publish(trail, request.tokens, request.blocks[trail.length]):
                self.pool.discard(block)
        self._expect(request)

    def release(self, request: Request) -> None:
        """Give back all blocks, last one first, so that a beginning outlives its continuation."""
        self.pool.give_back(reversed(request.blocks))
        request.blocks = []
        request.give_room(0)
        request.trail.rewind()

    def check(self, requests: Iterable[Request]) -> None:
        """Conservation of blocks; `requests` are all that live.  Raises ConservationError."""
        living = list(requests)
        self.pool.check(request.blocks for request in living)
        for request in living:
            if request.trail.length * self.block_size > request.num_computed:
                raise ConservationError(f"{request.request_id} has published what it has not computed")

    def _take(self, count: int) -> list[int]:
        for block in self.pool.evict(max(0, count - self.pool.num_free)):
            self.prefix.forget(block)
        return self.pool.take(count)

    def _expect(self, request: Request) -> None:
        request.publish_at = (request.trail.length + 1) * self.block_size if self._shares else NEVER_PUBLISHED

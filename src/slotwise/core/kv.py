"""Block tables: which blocks hold a request's keys and values.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           room up to token 47
                 found            found          taken         by another request that began with the same 32 tokens

What was found in host memory alone (`core/host.py`) needs a block, too, into which the plan loads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from slotwise.core.blocks import BlockPool, ConservationError
from slotwise.core.host import HostTier
from slotwise.core.prefix import NOWHERE, Entry, PrefixCache
from slotwise.core.request import Request

NEVER_PUBLISHED = 1 << 62  # tokens


class Seat(NamedTuple):
    """Room for a request that waits: what was found, and how many blocks must be taken beside those of the device."""

    found: list[Entry]
    away: list[Entry]  # those of the found that are in host memory alone
    num_missing: int


class BlockTables:
    """Hands out the pool's blocks to requests.  `Request.blocks` is changed nowhere else.

    Args:
        host: keeps what is evicted.
        shares: whether equal beginnings share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, host: HostTier, *, shares: bool) -> None:
        self.host = host
        self.prefix = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, self.prefix.has)
        self.block_size = block_size
        self._shares = shares

    def find(self, request: Request, num_tokens: int, spare: int) -> Seat | None:
        """Room for `num_tokens` tokens of a request that holds no blocks, leaving `spare` blocks; None: there is none.

        Of the known tokens at least one is left to compute, for somebody must yield the next one.
        """
        seat = self._looked_for(request, num_tokens)
        return None if self._lacking(seat) + spare > 0 else seat

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that would have to come free for `num_tokens` tokens of one that holds none; less than 1: none."""
        return self._lacking(self._looked_for(request, num_tokens))

    def _lacking(self, seat: Seat) -> int:
        idle = sum(self.pool.is_cached(entry.block) for entry in seat.found)
        return seat.num_missing - (self.pool.num_available - idle)

    def _looked_for(self, request: Request, num_tokens: int) -> Seat:
        """As much of its beginning as was found and one plan may load."""
        found = self.prefix.match(request.trail, request.tokens, len(request.tokens) - 1) if self._shares else []
        away = [index for index, entry in enumerate(found) if entry.block == NOWHERE]
        if len(away) > self.host.max_loads:
            del found[away[self.host.max_loads] :], away[self.host.max_loads :]
        missing = -(-num_tokens // self.block_size) - len(found) + len(away)
        return Seat(found, [found[index] for index in away], missing)

    def seat(self, request: Request, seat: Seat) -> int:
        """Give `request` its blocks: how many of its tokens they hold, or will when they are loaded."""
        found, away = seat.found, seat.away
        self.pool.share(entry.block for entry in found if entry.block != NOWHERE)
        self.host.hold(away)  # what is taken may be saved, and must not be saved there
        taken = self._take(seat.num_missing)
        for entry, block in zip(away, taken, strict=False):
            self.host.load(entry, block)
            self.prefix.put(entry, block)
        request.blocks = [entry.block for entry in found] + taken[len(away) :]
        request.room = len(request.blocks) * self.block_size
        trail = request.trail
        trail.length = len(found)
        trail.before = found[-1] if found else trail.salt
        self._expect(request)
        return len(found) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all: the blocks appended; None, and no change, when there is none."""
        missing = max(0, -(-num_tokens // self.block_size) - len(request.blocks))
        if missing > self.pool.num_available:
            return None
        blocks = self._take(missing)
        request.blocks.extend(blocks)
        request.room += len(blocks) * self.block_size
        return tuple(blocks)

    def publish(self, request: Request) -> None:
        """Let others find the blocks that `request` has computed to their ends."""
        trail = request.trail
        while (trail.length + 1) * self.block_size <= request.num_computed:
            replaced = self.prefix.publish(trail, request.tokens, request.blocks[trail.length])
            if replaced is not None:
                self.pool.discard(replaced.block)
                self.host.drop(replaced)
        self._expect(request)

    def release(self, request: Request) -> None:
        """Give back all blocks, last one first, so that a beginning outlives its continuation."""
        self.pool.give_back(reversed(request.blocks))
        request.blocks = []
        request.room = 0
        request.trail.rewind()

    def check(self, requests: Iterable[Request]) -> None:
        """Conservation of blocks; `requests` are all that live.  Raises ConservationError."""
        living = list(requests)
        self.pool.check(request.blocks for request in living)
        self.host.check(self.prefix.knows)
        for request in living:
            if request.trail.length * self.block_size > request.num_computed:
                raise ConservationError(f"{request.request_id} has published what it has not computed")

    def _take(self, count: int) -> list[int]:
        for block in self.pool.evict(max(0, count - self.pool.num_free)):
            lost = self.host.keep(self.prefix.vacate(block), block)
            if lost is not None and lost.block == NOWHERE:
                self.prefix.forget(lost)
        return self.pool.take(count)

    def _expect(self, request: Request) -> None:
        request.publish_at = (request.trail.length + 1) * self.block_size if self._shares else NEVER_PUBLISHED

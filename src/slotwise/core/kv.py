"""Block tables: which blocks hold a request's keys and values.

    tokens   0 ........ 15 | 16 ....... 31 | 32 .. 40          block_size 16, 41 tokens scheduled
    blocks       [7]              [2]            [9]           room up to token 47
"""

from __future__ import annotations

from collections.abc import Iterable

from slotwise.core.blocks import BlockPool
from slotwise.core.request import Request


class BlockTables:
    """Hands out the pool's blocks to requests.  `Request.blocks` is changed nowhere else."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks `request` lacks to hold `num_tokens` tokens in all."""
        return max(0, -(-num_tokens // self.block_size) - len(request.blocks))

    def reserve(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all: the blocks appended; None, and no change, when too few are free."""
        missing = self.missing(request, num_tokens)
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.take(missing)
        request.blocks.extend(blocks)
        return tuple(blocks)

    def release(self, request: Request) -> None:
        """Give back all blocks, last one first, so that a prefix outlives its continuation in the free queue."""
        self.pool.give_back(reversed(request.blocks))
        request.blocks = []

    def check(self, requests: Iterable[Request]) -> None:
        """Conservation of blocks; `requests` are all that live.  Raises ConservationError."""
        self.pool.check(request.blocks for request in requests)

"""The rows of one tile of a product with experts: pairs in the order of their experts (`experts.py`)."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from slotwise.kernels.cuda.jit import jit
from slotwise.kernels.cuda.prefill import find_row, first_tile


class Arranged(NamedTuple):
    """Pairs in the order of their experts."""

    pairs: Tensor  # [tokens * top_k] int32
    starts: Tensor  # [experts + 1] int32, where each expert's begin


@jit
def rows_of_tile(
    pairs: tl.tensor, starts: tl.tensor, num_experts: tl.tensor, TOP_K: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The expert, whether it has none of these rows, which it has, the rows that are read, and those written.

    The first product reads tokens and writes in the order of experts; the second goes back to pairs.
    """
    tile = tl.program_id(0)
    expert = find_row(starts, tile, num_experts, 1, BLOCK_M)
    begin = tl.load(starts + expert) + (tile - first_tile(starts, expert, 1, BLOCK_M)) * BLOCK_M
    end = tl.load(starts + expert + 1)
    place = begin + tl.arange(0, BLOCK_M)
    present = place < end
    pair = tl.load(pairs + place, present, 0)
    row = pair // TOP_K if FIRST else place
    to = place if FIRST else pair
    return expert.to(tl.int64), begin >= end, present, row.to(tl.int64), to.to(tl.int64)

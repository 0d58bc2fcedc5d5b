"""Small unsigned integers out of the 32-bit words in which checkpoints store them.  All hosts are little-endian."""

from __future__ import annotations

import torch
from torch import Tensor


def nibbles(stored: Tensor) -> Tensor:
    """The 4-bit numbers in `stored [..., n]` uint8, the low half of each byte first: `[..., 2 * n]` uint8."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of `bits` (4 or 8) bits in each row of `words [rows, n]` int32, lowest bits first.

    Returns `[rows, count]` uint8.
    """
    stored = words.contiguous().view(torch.uint8)
    return (nibbles(stored) if bits == 4 else stored)[:, :count]


def words_of(count: int, bits: int) -> int:
    """The 32-bit words that hold `count` numbers of `bits` bits."""
    return -(-count * bits // 32)

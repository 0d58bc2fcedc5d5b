"""The paged cache as the CPU wants to read it.

One block of one key-value head is contiguous: its keys with tokens as columns, its values with dimensions as columns,
so that scores and outputs are both products of `tile.py` and neither needs a sum across lanes.

    blocks x kv_heads x [ keys [head_dim, tokens] | values [tokens, head_dim] ]

Columns are padded to 16, the lanes of a vector.  In bfloat16 two vectors lie together, element beside element, which is
how `tile.py` reads them for nothing:

    0 16  1 17  2 18 ... 15 31 | 32 48  33 49 ... 47 63 | ... an odd last vector as it is
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.kernels.base import AttentionShape

LANES = 16


def padded(columns: int) -> int:
    """`columns` rounded up to whole vectors."""
    return -(-columns // LANES) * LANES


def stored_order(columns: int, kind: torch.dtype) -> Tensor:
    """Which column stands at each of `columns` places, a whole number of vectors."""
    order = torch.arange(columns)
    if kind != torch.bfloat16:
        return order
    pairs = order[: columns // (2 * LANES) * 2 * LANES].view(-1, 2, LANES).transpose(1, 2).flatten()
    return torch.cat([pairs, order[len(pairs) :]])


def head_block_elements(block_size: int, head_dim: int) -> tuple[int, int]:
    """Elements of keys and of values in one block of one key-value head."""
    return head_dim * padded(block_size), block_size * padded(head_dim)


@dataclass(frozen=True, slots=True)
class CpuCache:
    """One layer's keys and values."""

    storage: Tensor  # [blocks, kv_heads, key elements + value elements]
    block_size: int  # tokens
    address: int  # of `storage`
    geometry: tuple[int, ...]  # heads, kv_heads, head_dim, the same padded, block_size, the same padded

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int, shape: AttentionShape, kind: torch.dtype) -> CpuCache:
        """A zeroed cache; its pages are touched only once they are written."""
        elements = sum(head_block_elements(block_size, shape.head_dim))
        pages = mmap.mmap(-1, num_blocks * shape.num_kv_heads * elements * kind.itemsize)  # `torch.zeros` writes them
        storage = torch.frombuffer(pages, dtype=kind).view(num_blocks, shape.num_kv_heads, elements)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, padded(shape.head_dim))
        return cls(storage, block_size, storage.data_ptr(), (*heads, block_size, padded(block_size)))

    def keys_and_values(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Both as `[blocks, block_size, kv_heads, head_dim]`, copied, for whoever looks in from outside."""
        keys, values = self.storage.split(head_block_elements(self.block_size, shape.head_dim), dim=-1)
        keys = self._columns(keys.unflatten(-1, (shape.head_dim, padded(self.block_size))))[..., : self.block_size]
        values = self._columns(values.unflatten(-1, (self.block_size, padded(shape.head_dim))))[..., : shape.head_dim]
        return keys.permute(0, 3, 1, 2), values.transpose(1, 2)

    def _columns(self, stored: Tensor) -> Tensor:
        """In their own order."""
        return stored[..., stored_order(stored.shape[-1], stored.dtype).argsort()]

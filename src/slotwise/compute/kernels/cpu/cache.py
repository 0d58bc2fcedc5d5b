"""The paged cache of the CPU's kernels: its layout, and its memory.

One block of one key-value head is contiguous: its keys with tokens as columns, its values with dimensions as columns,
so that scores and outputs are both products of `gemm.py` and neither needs a sum across lanes.

    blocks x kv_heads x [ keys [head_dim, tokens] | values [tokens, head_dim] ]

Columns are padded to the lanes of a vector, 16 or 8.  In bfloat16 the elements of two vectors alternate, the order in
which `gemm.py` reads them at no cost.  With 16 lanes:

    0 16  1 17  2 18 ... 15 31 | 32 48  33 49 ... 47 63 | ... an odd last vector as it is

A cache of int8 holds each token's key and value of a head as integers in -127 ... 127, and their scales after the
values, where tokens are columns again:

    keys int8 [head_dim, tokens] | values int8 [tokens, head_dim] | scales float32 [2, tokens], of keys and of values

Of compressed attention a block holds a row for each token, its latent and its rotary key, each padded by itself.  The
latent is the value, too: one of both products would need the block transposed, so scores are computed transposed
instead, with a row of the block as A (`latent.py`).

    blocks x [ latent | rotary key  [tokens, padded(rank) + padded(rope_dim)] ]

A scale belongs to a column of the scores, so it multiplies the scores and the weights made of them: a few rows of 64
instead of every element of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.memory import discard, populate, untouched_pages
from slotwise.compute.kernels.cpu.processor import LANES, PAIR
from slotwise.compute.kernels.interface import AttentionShape, LatentShape, StateShape


def padded(columns: int) -> int:
    """`columns` rounded up to whole vectors."""
    return -(-columns // LANES) * LANES


def stored_order(columns: int, kind: torch.dtype) -> Tensor:
    """The column stored at each of `columns` places, a whole number of vectors."""
    order = torch.arange(columns)
    if kind != torch.bfloat16:
        return order
    pairs = order[: columns // PAIR * PAIR].view(-1, 2, LANES).transpose(1, 2).flatten()
    return torch.cat([pairs, order[len(pairs) :]])


def head_block_elements(block_size: int, head_dim: int, kind: torch.dtype) -> tuple[int, int, int]:
    """Elements of keys, values and scales in one block of one key-value head."""
    scales = 2 * padded(block_size) * torch.float32.itemsize if kind == torch.int8 else 0
    return head_dim * padded(block_size), block_size * padded(head_dim), scales


def latent_columns(shape: LatentShape) -> int:
    """Elements of a token's row in a cache of compressed attention."""
    return padded(shape.rank) + padded(shape.rope_dim)


@dataclass(frozen=True, slots=True)
class CpuCache:
    """One layer's keys and values, or states.

    Args:
        storage: `[blocks, kv_heads, elements of keys, values and scales]`, or `[blocks, 1, elements of a state]`, or
            `[blocks, 1, elements of all tokens]` in compressed attention.
        block_size: in tokens.
        address: of `storage`.
        geometry: query heads per kv_head, kv_heads, head_dim, padded, block_size, padded, bytes per head of a block.
    """

    storage: Tensor
    block_size: int
    address: int
    geometry: tuple[int, ...]

    @classmethod
    def of_states(cls, num_blocks: int, block_size: int, shape: StateShape) -> CpuCache:
        """A zeroed cache of recurrent states."""
        storage = torch.frombuffer(untouched_pages(num_blocks * shape.state_bytes), dtype=torch.float32)
        return cls(storage.view(num_blocks, 1, -1), block_size, storage.data_ptr(), ())

    @classmethod
    def of_latents(cls, num_blocks: int, block_size: int, shape: LatentShape, kind: torch.dtype) -> CpuCache:
        """A zeroed cache of latents and rotary keys."""
        columns = latent_columns(shape)
        storage = torch.frombuffer(untouched_pages(num_blocks * block_size * columns * kind.itemsize), dtype=kind)
        geometry = (shape.num_heads, 1, shape.rank, padded(shape.rank), block_size, block_size,
                    block_size * columns * kind.itemsize)
        return cls(storage.view(num_blocks, 1, -1), block_size, storage.data_ptr(), geometry)

    @property
    def block_bytes(self) -> int:
        return self.storage.stride(0) * self.storage.itemsize

    def states(self, shape: StateShape) -> Tensor:
        """The recurrent states that blocks hold, `[blocks, floats]` float32: a view."""
        return self.storage.flatten(1).view(torch.uint8)[:, : shape.state_bytes].view(torch.float32)

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int, shape: AttentionShape, kind: torch.dtype) -> CpuCache:
        """A zeroed cache; a page takes memory once it is written."""
        elements = sum(head_block_elements(block_size, shape.head_dim, kind))
        pages = untouched_pages(num_blocks * shape.num_kv_heads * elements * kind.itemsize)
        storage = torch.frombuffer(pages, dtype=kind).view(num_blocks, shape.num_kv_heads, elements)
        heads = (shape.num_heads // shape.num_kv_heads, shape.num_kv_heads, shape.head_dim, padded(shape.head_dim))
        block = (block_size, padded(block_size), elements * kind.itemsize)
        return cls(storage, block_size, storage.data_ptr(), (*heads, *block))

    def touch(self, first: int, end: int) -> bool:
        """Allocate memory for blocks `first ... end - 1`; False where the system cannot."""
        return populate(self.address + first * self.block_bytes, (end - first) * self.block_bytes)

    def give_back(self) -> None:
        """Return the memory of all blocks to the system, and lose their contents.  Raises OSError if that fails."""
        discard(self.address, self.storage.nbytes)

    def keys_and_values(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Copies of both as `[blocks, block_size, kv_heads, head_dim]`, for tests and tools."""
        keys, values, _ = self._parts(shape)
        keys = self._columns(keys.unflatten(-1, (shape.head_dim, padded(self.block_size))))[..., : self.block_size]
        values = self._columns(values.unflatten(-1, (self.block_size, padded(shape.head_dim))))[..., : shape.head_dim]
        return keys.permute(0, 3, 1, 2), values.transpose(1, 2)

    def scales(self, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Scales of keys and of values in an int8 cache, `[blocks, block_size, kv_heads]` each."""
        *_, stored = self._parts(shape)
        both = stored.contiguous().view(torch.float32).unflatten(-1, (2, -1))[..., : self.block_size]
        keys, values = both.transpose(1, 3).unbind(2)
        return keys, values

    def _parts(self, shape: AttentionShape) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.storage.split(
            head_block_elements(self.block_size, shape.head_dim, self.storage.dtype), dim=-1)
        return parts

    def _columns(self, stored: Tensor) -> Tensor:
        """Columns in their logical order."""
        return stored[..., stored_order(stored.shape[-1], stored.dtype).argsort()]

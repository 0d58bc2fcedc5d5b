"""The paged cache in the layout of the GPU's kernels.

One block of one key-value head is contiguous, `[block_size, head_dim]`, so a program that attends for one head reads
contiguous memory.  All of a block lies together, keys before values, so one copy per layer moves a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.kernels.interface import AttentionShape


@dataclass(frozen=True, slots=True)
class CudaCache:
    """One layer's keys and values."""

    storage: Tensor  # [blocks, 2, kv_heads, block_size, head_dim], contiguous; keys at 0, values at 1

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, shape: AttentionShape, kind: torch.dtype, device: torch.device
    ) -> CudaCache:
        """A zeroed cache."""
        size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        return cls(torch.zeros(size, dtype=kind, device=device))

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.storage.shape[3]

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Views of both as `[blocks, block_size, kv_heads, head_dim]`, for tests and tools."""
        keys, values = self.storage.unbind(1)
        return keys.transpose(1, 2), values.transpose(1, 2)


def bytes_per_block(block_size: int, shape: AttentionShape, kind: torch.dtype) -> int:
    """Bytes one block takes in one layer, keys and values together."""
    return 2 * shape.num_kv_heads * block_size * shape.head_dim * kind.itemsize

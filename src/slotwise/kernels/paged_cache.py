"""The cache of the reference kernels: one storage, of which keys, values and scales are views.

A block's bytes lie together, so that layers of other kinds may keep in them what they need (`delta.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, dtype, float8_e4m3fn, int8

from slotwise.kernels.delta import DeltaShape
from slotwise.kernels.interface import AttentionShape

# The types that a cache of keys and values may have.

CACHE_KINDS: dict[str, dtype | None] = {"auto": None, "int8": int8, "fp8": float8_e4m3fn}
"""The types of a cache, by the names of options; None: the type that the model computes in.

int8 has a scale for each token and head.  fp8 has none; values beyond FP8_LARGEST are stored as FP8_LARGEST.
"""

FP8_LARGEST = 448.0  # of four bits of exponent and three of fraction (Micikevicius et al., 2022)


def cache_kind(name: str, device: str, kept: Sequence[str]) -> dtype | None:
    """The type of `CACHE_KINDS` for `name`, which must be in `kept`, the names a device supports.

    Raises:
        ValueError: it is not in `kept`.
    """
    if name not in kept:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(kept)} on device {device}, not {name!r}")
    return CACHE_KINDS[name]


def as_bytes(x: Tensor) -> Tensor:
    """`x` itself, or for one-byte elements that torch does not index, a view as int8, which it does."""
    return x.view(int8) if x.itemsize == 1 else x


class PagedCache(NamedTuple):
    """One layer's keys and values, `[blocks, block_size, kv_heads, head_dim]`."""

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int
    keys: Tensor
    values: Tensor

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set `places [tokens]` to float32 `[tokens, kv_heads, head_dim]`."""
        at = places // self.block_size, places % self.block_size
        for stored, new in ((self.keys, keys), (self.values, values)):
            as_bytes(stored)[at] = as_bytes(narrowed(new, stored.dtype))

    def read(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at these places, as float32."""
        places = blocks, offsets
        kind = self.keys.dtype
        return as_bytes(self.keys)[places].view(kind).float(), as_bytes(self.values)[places].view(kind).float()


class QuantisedPagedCache(NamedTuple):
    """int8 keys and values, with a scale for each token and head, `[blocks, block_size, kv_heads]` float32."""

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int
    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor

    def write(self, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set `places [tokens]` to quantised float32 `[tokens, kv_heads, head_dim]`."""
        at = places // self.block_size, places % self.block_size
        for stored, scales, new in ((self.keys, self.key_scales, keys), (self.values, self.value_scales, values)):
            stored[at], scales[at] = quantise(new)

    def read(self, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised keys and values at these places, as float32."""
        places = blocks, offsets
        return (self.keys[places] * self.key_scales[places].unsqueeze(-1),
                self.values[places] * self.value_scales[places].unsqueeze(-1))


class StateCache(NamedTuple):
    """A layer's recurrent states."""

    storage: Tensor  # [blocks, bytes] uint8
    block_size: int


ReferenceCache = PagedCache | QuantisedPagedCache | StateCache


def bytes_per_block(block_size: int, shape: AttentionShape | DeltaShape, kind: torch.dtype) -> int:
    """Bytes one block takes in one layer, in a cache of `kind`."""
    if isinstance(shape, DeltaShape):
        return shape.state_bytes
    return sum(_sizes(block_size, shape, kind))


def allocate(
    num_blocks: int, block_size: int, shape: AttentionShape | DeltaShape, kind: torch.dtype, device: torch.device,
) -> ReferenceCache:
    """A zeroed cache of `kind`."""
    size = num_blocks, bytes_per_block(block_size, shape, kind)
    storage = torch.zeros(size, dtype=torch.uint8, device=device)
    if isinstance(shape, DeltaShape):
        return StateCache(storage, block_size)
    of_token = num_blocks, block_size, shape.num_kv_heads
    keys, values, *scales = storage.split(_sizes(block_size, shape, kind), dim=1)
    keys, values = (part.view(kind).view(*of_token, shape.head_dim) for part in (keys, values))
    if not scales:
        return PagedCache(storage, block_size, keys, values)
    key_scales, value_scales = (part.view(torch.float32).view(of_token) for part in scales)
    return QuantisedPagedCache(storage, block_size, keys, values, key_scales, value_scales)


def states(cache: ReferenceCache, shape: DeltaShape) -> Tensor:
    """The states that the blocks hold, `[blocks, floats]` float32."""
    return cache.storage[:, : shape.state_bytes].view(torch.float32)


def _sizes(block_size: int, shape: AttentionShape, kind: torch.dtype) -> list[int]:
    """Bytes of a block's keys, values, and their scales, if any."""
    heads = block_size * shape.num_kv_heads
    numbers = [heads * shape.head_dim * kind.itemsize] * 2
    return numbers + [heads * torch.float32.itemsize] * 2 if kind == torch.int8 else numbers


def narrowed(x: Tensor, kind: torch.dtype) -> Tensor:
    """`x` as another float type.  Values beyond fp8's range become its largest; torch would make them NaN."""
    return (x.clamp(-FP8_LARGEST, FP8_LARGEST) if kind == torch.float8_e4m3fn else x).to(kind)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., head_dim]` as int8 in -127 ... 127, and the scales `[...]` float32."""
    scales = x.float().abs().amax(-1) / 127
    return (x.float() / scales.clamp_min(1e-30 / 127).unsqueeze(-1)).round().nan_to_num_().to(torch.int8), scales

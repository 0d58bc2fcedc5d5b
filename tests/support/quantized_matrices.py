"""Quantized matrices of random numbers, and products with them in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.compute.kernels.matrix import E4M3, Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.compute.model.quantization.bitsandbytes import NF4

FORMATS = {name: kind.format for name, kind in BLOCK_TYPES.items()} | {
    "GPTQ": Format(4, 128, torch.float16, zero=8), "GPTQ 8": Format(8, 128, torch.float16, zero=128),
    "a row's": Format(4, 0, torch.float16, zero=8), "AWQ": Format(4, 64, torch.float32, has_minimums=True),
    "NF4": Format(4, 64, torch.float32, levels=NF4), "3 bits": Format(3, 16, torch.bfloat16, zero=4),
    "FP8 blocks": Format(8, 128, torch.float32, levels=E4M3), "FP8": Format(8, 0, torch.float32, levels=E4M3),
}  # fmt: skip


def depth_of(kind: Format, least: int) -> int:
    """A depth that the format's units divide."""
    together = kind.group * kind.groups_per_unit
    return -(-least // together) * together if together else least


def random_matrix(
    kind: Format, outputs: int, depth: int, *, seed: int = 0, is_ordered: bool = False
) -> QuantizedMatrix:
    """Random codes and scales, which make products with normally distributed numbers about 1."""
    size_of_one = 4 / (max(map(abs, kind.levels), default=1 << kind.bits) * depth**0.5)
    generator = torch.Generator().manual_seed(seed)
    groups = -(-depth // kind.group) if kind.group else 1

    def factors(*, positive: bool, is_minimum: bool = False) -> Factors:
        size = (outputs, groups)
        signs = 1 if positive else torch.randint(0, 2, size, generator=generator) * 2 - 1
        if kind.groups_per_unit:
            limit = 1 << kind.scale_bits - (not kind.has_minimums)
            values = (torch.randint(1, limit, size, generator=generator) * signs).to(kind.scale)
            units = torch.rand((outputs, -(-groups // kind.groups_per_unit)), generator=generator) + 0.1
            return Factors(values, (units * size_of_one / limit).half())
        numbers = (torch.rand(size, generator=generator) + 0.1) * signs
        return Factors((numbers * size_of_one * (1 << kind.bits - 1 if is_minimum else 1)).to(kind.scale))

    codes = torch.randint(0, 1 << kind.bits, (outputs, depth), generator=generator).to(torch.uint8)
    scales = factors(positive=kind.has_minimums)
    minimums = factors(positive=True, is_minimum=True) if kind.has_minimums else None

    def part(whole: Factors, first: int, end: int) -> Factors:
        return Factors(whole.values[first:end], None if whole.units is None else whole.units[first:end])

    def read(first: int, end: int) -> Rows:
        assert 0 <= first < end <= outputs
        return Rows(codes[first:end], part(scales, first, end),
                    None if minimums is None else part(minimums, first, end))

    order = torch.randperm(depth, generator=generator) if is_ordered else None
    return QuantizedMatrix(kind, outputs, depth, read, order)


def rounded_activations(x: Tensor, unit: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x [tokens, depth]` as whole steps of each unit's scale, float64: the same numbers that the kernels multiply.

    And by how much each may be off: a number half way between two steps goes either way where the last place of a
    factor is another.
    """
    places = torch.arange(x.shape[1]) if order is None else order.argsort()
    units = F.pad(x.float()[:, places], (0, -x.shape[1] % unit)).unflatten(1, (-1, unit))
    largest = units.abs().amax(2, keepdim=True)
    by = 127 / largest.clamp_min(1e-30)
    scaled, own = units.double() * by.double(), (largest / 127).double()

    def back(steps: Tensor) -> Tensor:
        inputs = torch.empty_like(x, dtype=torch.float64)
        inputs[:, places] = (steps * own).flatten(1)[:, : x.shape[1]]
        return inputs

    return back(scaled.round()), back(((scaled - scaled.floor() - 0.5).abs() < 1e-4).double())

"""Weights rounded to GGUF's types: by the `gguf` package where it writes a type, else here, group by group.

A group gets the one of a few scales that leaves the least squared error, as a share of what its extremes ask for.
`llama-quantize` searches longer.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from slotwise.kernels.matrix import Factors, Format, QuantisedMatrix, Rows
from slotwise.model.gguf.blocks import BLOCK_TYPES

TINY = 1e-12
SHARES = (1.0, 1.1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)


def rounded(weight: Tensor, name: str) -> QuantisedMatrix:
    """`weight [outputs, depth]` in one of `BLOCK_TYPES`."""
    outputs, depth = weight.shape
    try:
        data = quantize(weight.float().numpy(), GGMLQuantizationType[name])
    except NotImplementedError:
        return _by_extremes(weight.float(), BLOCK_TYPES[name].format)
    return BLOCK_TYPES[name].matrix(torch.from_numpy(np.ascontiguousarray(data)), outputs, depth)


def _by_extremes(weight: Tensor, kind: Format) -> QuantisedMatrix:
    groups = weight.unflatten(1, (-1, kind.group))
    best, chosen = torch.full(groups.shape[:2], torch.inf), torch.ones(groups.shape[:2])
    for share in SHARES:
        scales, minimums = _factors(groups * share, kind)
        error = (_values(_codes(groups, scales, minimums, kind), scales, minimums, kind) - groups).square().sum(2)
        chosen = torch.where(error < best, share, chosen)
        best = torch.minimum(error, best)
    scales, minimums = _factors(groups * chosen[:, :, None], kind)
    stored = _in_units(scales, kind)
    offsets = None if minimums is None else _in_units(minimums, kind)
    codes = _codes(groups, stored.floats(), None if offsets is None else offsets.floats(), kind).flatten(1)

    def part(whole: Factors, first: int, end: int) -> Factors:
        return Factors(whole.values[first:end], None if whole.units is None else whole.units[first:end])

    def read(first: int, end: int) -> Rows:
        return Rows(codes[first:end], part(stored, first, end), None if offsets is None else part(offsets, first, end))

    return QuantisedMatrix(kind, *weight.shape, read)


def _factors(groups: Tensor, kind: Format) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums `[outputs, groups]` with which the extremes are levels."""
    if kind.has_minimums:
        least = groups.amin(2).clamp_max(0)
        return (groups.amax(2) - least) / ((1 << kind.bits) - 1), -least
    farthest = min(kind.levels) if kind.levels else -kind.zero  # the largest becomes the level farthest from zero
    return groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0] / farthest, None


def _codes(groups: Tensor, scales: Tensor, minimums: Tensor | None, kind: Format) -> Tensor:
    """The nearest code of each weight."""
    by = torch.where(scales.abs() < TINY, TINY, scales)[:, :, None]
    exact = (groups + (0 if minimums is None else minimums[:, :, None])) / by
    if kind.levels:
        levels = torch.tensor(kind.levels)
        return torch.bucketize(exact, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return (exact + kind.zero).round().clamp(0, (1 << kind.bits) - 1).to(torch.uint8)


def _values(codes: Tensor, scales: Tensor, minimums: Tensor | None, kind: Format) -> Tensor:
    levels = torch.tensor(kind.levels)[codes.int()] if kind.levels else codes - float(kind.zero)
    return scales[:, :, None] * levels - (0 if minimums is None else minimums[:, :, None])


def _in_units(factors: Tensor, kind: Format) -> Factors:
    """Factors `[outputs, groups]` as the format stores them."""
    if not kind.groups_per_unit:
        return Factors(factors.to(kind.scale))
    limit = (1 << kind.scale_bits - (not kind.has_minimums)) - 1
    blocks = factors.unflatten(1, (-1, kind.groups_per_unit))
    units = (blocks.abs().amax(2, keepdim=True) / limit).half()
    values = (blocks / units.float().clamp_min(TINY)).round().clamp(-limit, limit)
    return Factors(values.flatten(1).to(kind.scale), units[:, :, 0])

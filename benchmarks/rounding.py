"""Weights rounded to GGUF's types: by the `gguf` package where it writes a type, else each group by its extremes.

What `llama-quantize` writes is better: it searches for the scales with the least error.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from slotwise.kernels.matrix import Factors, Format, QuantisedMatrix, Rows
from slotwise.model.quantization.gguf_blocks import BLOCK_TYPES

TINY = 1e-12


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
    if kind.has_minimums:
        least = groups.amin(2).clamp_max(0)
        scales = _in_units((groups.amax(2) - least) / ((1 << kind.bits) - 1), kind)
        minimums = _in_units(-least, kind)
    else:  # the largest becomes the level that is the farthest from zero
        farthest = min(kind.levels) if kind.levels else -kind.zero
        at = groups.abs().argmax(2, keepdim=True)
        scales, minimums = _in_units(groups.gather(2, at)[:, :, 0] / farthest, kind), None
    by = scales.floats()
    by = torch.where(by.abs() < TINY, TINY, by)[:, :, None]
    exact = (groups + (0 if minimums is None else minimums.floats()[:, :, None])) / by
    if kind.levels:
        levels = torch.tensor(kind.levels)
        codes = torch.bucketize(exact, (levels[1:] + levels[:-1]) / 2)
    else:
        codes = (exact + kind.zero).round().clamp(0, (1 << kind.bits) - 1)
    flat = codes.to(torch.uint8).flatten(1)

    def part(whole: Factors, first: int, end: int) -> Factors:
        return Factors(whole.values[first:end], None if whole.units is None else whole.units[first:end])

    def read(first: int, end: int) -> Rows:
        return Rows(flat[first:end], part(scales, first, end), None if minimums is None else part(minimums, first, end))

    return QuantisedMatrix(kind, *weight.shape, read)


def _in_units(factors: Tensor, kind: Format) -> Factors:
    """Factors `[outputs, groups]` as the format stores them."""
    if not kind.groups_per_unit:
        return Factors(factors.to(kind.scale))
    limit = (1 << kind.scale_bits - (not kind.has_minimums)) - 1
    blocks = factors.unflatten(1, (-1, kind.groups_per_unit))
    units = (blocks.abs().amax(2, keepdim=True) / limit).half()
    values = (blocks / units.float().clamp_min(TINY)).round().clamp(-limit, limit)
    return Factors(values.flatten(1).to(kind.scale), units[:, :, 0])

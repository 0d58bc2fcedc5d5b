"""Weights of integers with a scale, and perhaps a zero point, for each group: what most formats store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.kernels.matrix import Factors, Format, QuantisedMatrix, Rows
from slotwise.model.quantization.scheme import Layer, check_range


@dataclass(frozen=True, slots=True)
class Affine:
    """Unsigned codes of `bits` bits: `scale * (code - zero)`."""

    bits: int
    group: int  # inputs that share a scale; 0: all of a row
    has_zeros: bool  # one of each group; else the middle of the codes is zero

    def format(self, depth: int) -> Format:
        if self.has_zeros:  # as minimums, exact in float32
            return Format(self.bits, self.group, torch.float32, has_minimums=True)
        return Format(self.bits, self.group, torch.float16, zero=1 << self.bits - 1)

    def matrix(
        self, layer: Layer, codes: Callable[[int, int], Tensor], part: str, scales: Tensor, zeros: Tensor | None,
        order: Tensor | None = None,
    ) -> QuantisedMatrix:
        """The weight with `codes(first, end) [end - first, depth]` uint8 and `scales [outputs, groups]`.

        `part` names the scales in messages; `zeros` are of their shape.
        """
        check_range(layer, part, scales, 1 << self.bits)
        minimums = None
        if self.has_zeros:
            assert zeros is not None
            scales = scales.float()
            minimums = scales * zeros.float()

        def read(first: int, end: int) -> Rows:
            return Rows(codes(first, end), Factors(scales[first:end]),
                        None if minimums is None else Factors(minimums[first:end]))

        kind = replace(self.format(layer.depth), scale=scales.dtype)
        return QuantisedMatrix(kind, layer.outputs, layer.depth, read, order)

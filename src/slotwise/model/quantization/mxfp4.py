"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats, 2023).

    blocks   [outputs, ..., depth / 2] uint8    two numbers a byte, the first in the low half
    scales   [outputs, depth / 32] uint8        exponents of two, plus 127 (E8M0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.kernels.matrix import Factors, Format, QuantisedMatrix, Rows
from slotwise.model.quantization.gguf_blocks import MXFP4_LEVELS
from slotwise.model.quantization.packing import nibbles
from slotwise.model.quantization.scheme import Layer, Part, check_range

GROUP = 32
FORMAT = Format(4, GROUP, torch.bfloat16, levels=MXFP4_LEVELS)  # whose levels are doubled, and scales halved


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """One module's weight, of the parts `blocks` and `scales`."""

    blocks: str
    scales: str

    def format(self, depth: int) -> Format:
        return FORMAT

    def parts(self, outputs: int, depth: int) -> Mapping[str, Part]:
        groups = -(-depth // GROUP)
        return {
            self.blocks: Part(("U8",), ((outputs, -(-depth // 2)), (outputs, groups, GROUP // 2))),
            self.scales: Part(("U8", "F8_E8M0"), ((outputs, groups),))}

    def matrix(self, layer: Layer) -> QuantisedMatrix:
        blocks, scales = layer.tensor(self.blocks).flatten(1), powers(layer, self.scales) * 0.5

        def read(first: int, end: int) -> Rows:
            return Rows(nibbles(blocks[first:end])[:, : layer.depth], Factors(scales[first:end].bfloat16()))

        check_range(layer, self.scales, scales, max(MXFP4_LEVELS))
        return QuantisedMatrix(FORMAT, layer.outputs, layer.depth, read)


def powers(layer: Layer, part: str) -> Tensor:
    """Powers of two in float32, of their exponents.  Raises CheckpointError where one stands for NaN."""
    factors = layer.tensor(part).view(torch.float8_e8m0fnu).float()
    if not factors.isfinite().all():
        raise layer.error(part, "holds NaN: download the checkpoint again")
    return factors

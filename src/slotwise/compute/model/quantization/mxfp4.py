"""MXFP4: 4-bit floats in groups of 32 that share a power of two (OCP Microscaling Formats, 2023).

    blocks   [outputs, ..., depth / 2] uint8    two numbers a byte, the first in the low half
    scales   [outputs, depth / 32] uint8        exponents of two, plus 127 (E8M0)

The experts of gpt-oss (quant_method `mxfp4`) lie together, with their number as first dimension of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import Spellings
from slotwise.compute.model.quantization.patterns import read_names
from slotwise.compute.model.quantization.scheme import StoredLayer, StoredPart, check_range, nibbles, refuse_unknown

GROUP = 32
# The levels of the format, doubled, so that they are whole numbers.
MXFP4_LEVELS = tuple(map(float, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)))
FORMAT = Format(4, GROUP, torch.bfloat16, levels=MXFP4_LEVELS)  # whose levels are doubled, and scales halved


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """One module's weight, of the parts `blocks` and `scales`."""

    blocks: str
    scales: str

    def format(self, depth: int) -> Format:
        return FORMAT

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        groups = -(-depth // GROUP)
        return {
            self.blocks: StoredPart(("U8",), ((outputs, -(-depth // 2)), (outputs, groups, GROUP // 2))),
            self.scales: StoredPart(("U8", "F8_E8M0"), ((outputs, groups),))}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        blocks, scales = layer.tensor(self.blocks).flatten(1), powers(layer, self.scales) * 0.5

        def read(first: int, end: int) -> Rows:
            return Rows(nibbles(blocks[first:end])[:, : layer.depth], Factors(scales[first:end].bfloat16()))

        check_range(layer, self.scales, scales, max(MXFP4_LEVELS))
        return QuantizedMatrix(FORMAT, layer.outputs, layer.depth, read)


def powers(layer: StoredLayer, part: str) -> Tensor:
    """Powers of two in float32, of their exponents.  Raises CheckpointError where one stands for NaN."""
    factors = layer.tensor(part).view(torch.float8_e8m0fnu).float()
    if not factors.isfinite().all():
        raise layer.error(part, "holds NaN: download the checkpoint again")
    return factors


class MXFP4:
    """The quantization_config of quant_method `mxfp4`, which stores the experts of gpt-oss in this format."""

    description = "MXFP4"

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "MXFP4", ("quant_method", "modules_to_not_convert", "dequantize"))
        read_names(fields, "modules_to_not_convert")  # all but experts are plain anyway
        fields.flag("dequantize")

    def scheme(self, module: str) -> None:
        """All products except the experts are plain."""

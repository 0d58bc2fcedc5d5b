"""BitNet's ternary weights (Ma et al., "The era of 1-bit LLMs", 2024), four to a byte, with one scale for a matrix.

    weight         [outputs / 4, depth] uint8: bits 2 i and 2 i + 1 of row r are output i * outputs / 4 + r, plus 1
    weight_scale   one number, which multiplies weights (`linear_class` autobitlinear) or divides them (bitlinear)

Products are those of the weights: activations are not rounded to 8 bits before them, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import HEAD, Spellings
from slotwise.compute.model.quantization.patterns import read_skipped
from slotwise.compute.model.quantization.scheme import (
    FLOATS,
    NUMBER,
    StoredLayer,
    StoredPart,
    check_range,
    choice,
    refuse_unknown,
)

PER_BYTE = 4
ZERO = 8  # of codes of 4 bits, in which kernels hold the weights
READ = frozenset((
    "quant_method", "modules_to_not_convert", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps"))
DIVIDED, MULTIPLIED = "bitlinear", "autobitlinear"


@dataclass(frozen=True, slots=True)
class BitNetScheme:
    """One module's weight."""

    divides: bool  # by the scale

    def format(self, depth: int) -> Format:
        return Format(4, 0, torch.float32, zero=ZERO)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        return {"weight": StoredPart(("U8",), ((-(-outputs // PER_BYTE), depth),)),
                "weight_scale": StoredPart(FLOATS, NUMBER)}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        packed, scale = layer.tensor("weight"), layer.numbers("weight_scale").float().reshape(1, 1)
        if self.divides:
            scale = 1 / scale
        check_range(layer, "weight_scale", scale, 1.0)

        def read(first: int, end: int) -> Rows:
            outputs = torch.arange(first, end)
            codes = packed[outputs % len(packed)] >> (2 * (outputs // len(packed))).to(torch.uint8)[:, None] & 3
            if (codes == PER_BYTE - 1).any():
                raise layer.error("weight", "holds codes that no weight has: download the checkpoint again")
            return Rows(codes + (ZERO - 1), Factors(scale.expand(end - first, 1)))

        return QuantizedMatrix(self.format(layer.depth), layer.outputs, layer.depth, read)


class BitNet:
    """The quantization_config of quant_method `bitnet`."""

    description = "BitNet, 1.58 bits"

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "BitNet", READ)
        if fields.flag("use_rms_norm"):
            raise fields.error("use_rms_norm", "is true, which is not supported")
        if choice(fields, "quantization_mode", "offline", "offline", "online") == "online":
            raise fields.error("quantization_mode", "online, of plain weights that are rounded in every step, is not "
                               "supported: serve the packed checkpoint")
        self._scheme = BitNetScheme(choice(fields, "linear_class", DIVIDED, DIVIDED, MULTIPLIED) == DIVIDED)
        self._is_skipped = read_skipped(fields, spell, "modules_to_not_convert")

    def scheme(self, module: str) -> BitNetScheme | None:
        return None if module == HEAD or self._is_skipped(module) else self._scheme

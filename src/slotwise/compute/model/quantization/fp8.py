"""8-bit floats (E4M3; Micikevicius et al., 2022), with a scale for each block, row or matrix.

DeepSeek's and Qwen3's FP8 checkpoints have blocks of 128 outputs x 128 inputs (quant_method `fp8`,
`weight_block_size`); where that field is null, a matrix has one scale.

    weight             [outputs, depth] E4M3
    weight_scale_inv   [outputs / 128, depth / 128]: what weights are multiplied with, whatever its name says
    activation_scale   one number, which is not used: activations are quantized token by token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import FP8_LARGEST
from slotwise.compute.kernels.matrix import E4M3, Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import HEAD, Spellings
from slotwise.compute.model.quantization.mxfp4 import powers
from slotwise.compute.model.quantization.patterns import read_skipped
from slotwise.compute.model.quantization.scheme import (
    FLOATS,
    GROUPS,
    NUMBER,
    StoredLayer,
    StoredPart,
    check_range,
    choice,
    groups_of,
    refuse_unknown,
)

KIND, EXPONENTS = "F8_E4M3", "F8_E8M0"
NO_NUMBER = 0x7F  # bits of NaN, without the sign
SCALES = ("weight_scale_inv", "weight_scale")  # the same, of two makers
UNUSED = ("activation_scale", "input_scale")  # of activations
MAX_ROWS = 1 << 20
READ = frozenset((
    "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "fmt",
    "scale_fmt", "dequantize"))


def fp8_format(depth: int, group: int) -> Format:
    return Format(8, group, torch.float32, levels=E4M3)


def fp8_matrix(layer: StoredLayer, part: str, scales: Tensor, group: int) -> QuantizedMatrix:
    """The matrix of the part `weight` with `scales [outputs or 1, groups]`.  `part` names them in messages."""
    stored = layer.tensor("weight").view(torch.uint8)
    scales = scales.expand(layer.outputs, -1)
    check_range(layer, part, scales, FP8_LARGEST)

    def read(first: int, end: int) -> Rows:
        codes = stored[first:end]
        if (codes & NO_NUMBER == NO_NUMBER).any():
            raise layer.error("weight", "holds NaN: download the checkpoint again")
        return Rows(codes, Factors(scales[first:end]))

    kind = replace(fp8_format(layer.depth, group), scale=scales.dtype)
    return QuantizedMatrix(kind, layer.outputs, layer.depth, read)


def of_rows(blocks: Tensor, rows: int, outputs: int) -> Tensor:
    """Scales of blocks of `rows` outputs as those of each output; `rows` 0: one for all."""
    return blocks.repeat_interleave(rows, dim=0)[:outputs] if rows else blocks


@dataclass(frozen=True, slots=True)
class FP8Scheme:
    """One module's weight."""

    rows: int  # outputs of a block; 0: all
    group: int  # inputs of a block; 0: all

    def format(self, depth: int) -> Format:
        return fp8_format(depth, self.group)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        shapes = ((groups_of(outputs, self.rows), groups_of(depth, self.group)),) if self.rows else NUMBER
        return {
            "weight": StoredPart((KIND,), ((outputs, depth),)),
            **{name: StoredPart((*FLOATS, EXPONENTS, "U8"), shapes, is_optional=True) for name in SCALES},
            **{name: StoredPart(FLOATS, NUMBER, is_optional=True) for name in UNUSED}}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        found = [name for name in SCALES if layer.has(name)]
        if len(found) != 1:
            raise layer.error(" and ".join(SCALES), "are both there" if found else "are missing: one must be there")
        [name] = found
        is_power = layer.tensor(name).itemsize == 1
        scales = powers(layer, name) if is_power else layer.numbers(name)
        blocks = scales.reshape(-1, groups_of(layer.depth, self.group))
        return fp8_matrix(layer, name, of_rows(blocks, self.rows, layer.outputs), self.group)


class FP8:
    """The quantization_config of quant_method `fp8`."""

    description = "FP8"

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "FP8", READ)
        choice(fields, "activation_scheme", "dynamic", "dynamic", "static")
        choice(fields, "fmt", "e4m3", "e4m3", "float8_e4m3fn")
        choice(fields, "scale_fmt", "float", "float", "ue8m0")
        fields.flag("dequantize")
        self._scheme = FP8Scheme(*_read_block(fields))
        self._is_skipped = read_skipped(fields, spell, "modules_to_not_convert", "ignored_layers")

    def scheme(self, module: str) -> FP8Scheme | None:
        return None if module == HEAD or self._is_skipped(module) else self._scheme


def _read_block(fields: Fields) -> tuple[int, int]:
    """Outputs and inputs that share a scale; zeros: all of them."""
    return read_pair(fields, "weight_block_size") if fields.has("weight_block_size") else (0, 0)


def read_pair(fields: Fields, name: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    size = fields.values.get(name)
    if not isinstance(size, list) or [type(each) for each in size] != [int, int] or not 1 <= size[0] <= MAX_ROWS:
        raise fields.error(name, f"must be two numbers, the first from 1 to {MAX_ROWS}, not {size!r:.40}")
    if size[1] not in GROUPS:
        raise fields.error(name, f"must have one of {GROUPS} as its second number, not {size[1]!r:.40}")
    return size[0], size[1]

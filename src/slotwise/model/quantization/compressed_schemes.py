"""How compressed-tensors stores weights: see `compressed_tensors.py` for the parts of each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.kernels.matrix import Format, QuantisedMatrix
from slotwise.model.quantization.affine import Affine
from slotwise.model.quantization.fp8 import KIND as FP8_KIND
from slotwise.model.quantization.fp8 import fp8_format, fp8_matrix, of_rows
from slotwise.model.quantization.packing import unpack, words_of
from slotwise.model.quantization.scheme import FLOATS, NUMBER, Layer, Part, Shape, groups_of, read_order

TENSOR, CHANNEL, GROUP, BLOCK = "tensor", "channel", "group", "block"  # what has a scale
BYTE = 8
OF_ACTIVATIONS = {  # scales that may be there and are not used
    "input_scale": Part(FLOATS, NUMBER, is_optional=True),
    "input_zero_point": Part(("I8", FP8_KIND), NUMBER, is_optional=True)}


class Scales(NamedTuple):
    """What shares a scale: `rows` outputs (0: all) and `group` inputs (0: all)."""

    strategy: str
    rows: int
    group: int

    def shapes(self, outputs: int, depth: int) -> tuple[Shape, ...]:
        """The shapes that scales may have in the file."""
        if self.strategy == TENSOR:
            return NUMBER
        size = (groups_of(outputs, self.rows), groups_of(depth, self.group))
        return (size, (outputs,)) if self.strategy == CHANNEL else (size,)

    def of_outputs(self, stored: Tensor, outputs: int, depth: int) -> Tensor:
        """`stored` as `[outputs, groups]`."""
        blocks = stored.reshape(-1, groups_of(depth, self.group))
        return of_rows(blocks, self.rows, outputs).expand(outputs, -1)


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """Integers of 4 or 8 bits, in words or one a byte."""

    bits: int
    scales: Scales
    is_symmetric: bool
    is_packed: bool
    is_ordered: bool  # weight_g_idx must be there

    @property
    def _affine(self) -> Affine:
        return Affine(self.bits, self.scales.group, has_zeros=not self.is_symmetric)

    def format(self, depth: int) -> Format:
        return self._affine.format(depth)

    def parts(self, outputs: int, depth: int) -> Mapping[str, Part]:
        shapes = self.scales.shapes(outputs, depth)
        parts = {"weight_scale": Part(FLOATS, shapes), **OF_ACTIVATIONS}
        if not self.is_packed:
            return parts | {
                "weight": Part(("I8",), ((outputs, depth),)),
                "weight_zero_point": Part(("I8",), shapes, is_optional=self.is_symmetric)}
        groups = groups_of(depth, self.scales.group)
        if not self.is_symmetric:
            parts["weight_zero_point"] = Part(("I32",), ((words_of(outputs, self.bits), groups),))
        return parts | {
            "weight_packed": Part(("I32",), ((outputs, words_of(depth, self.bits)),)),
            "weight_shape": Part(("I64", "I32"), ((2,),)),
            "weight_g_idx": Part(("I32", "I64"), ((depth,),), is_optional=not self.is_ordered)}

    def matrix(self, layer: Layer) -> QuantisedMatrix:
        scales = self.scales.of_outputs(layer.numbers("weight_scale"), layer.outputs, layer.depth)
        order = read_order(layer, "weight_g_idx", self.scales.group) if layer.has("weight_g_idx") else None
        codes = self._packed_codes(layer) if self.is_packed else self._codes(layer)
        return self._affine.matrix(layer, codes, "weight_scale", scales, self._zeros(layer), order)

    def _packed_codes(self, layer: Layer) -> Callable[[int, int], Tensor]:
        if layer.tensor("weight_shape").tolist() != [layer.outputs, layer.depth]:
            raise layer.error("weight_shape", f"must be {[layer.outputs, layer.depth]}")
        words = layer.tensor("weight_packed")
        return lambda first, end: unpack(words[first:end], self.bits, layer.depth)

    def _codes(self, layer: Layer) -> Callable[[int, int], Tensor]:
        weight, middle = layer.tensor("weight"), 1 << self.bits - 1

        def codes(first: int, end: int) -> Tensor:
            numbers = weight[first:end]
            if self.bits < BYTE and (numbers.amin() < -middle or numbers.amax() >= middle):
                raise layer.error("weight", f"holds integers of more than {self.bits} bits")
            return (numbers.view(torch.uint8) + middle) & ((1 << self.bits) - 1)

        return codes

    def _zeros(self, layer: Layer) -> Tensor | None:
        """The zero points' codes, `[outputs, groups]`; None: the middle."""
        name = "weight_zero_point"
        if self.is_symmetric:
            if layer.has(name) and layer.tensor(name).any():
                raise layer.error(name, "is not zero, but the config says symmetric")
            return None
        if self.is_packed:
            return unpack(layer.tensor(name).t(), self.bits, layer.outputs).t()
        stored = self.scales.of_outputs(layer.tensor(name), layer.outputs, layer.depth)
        return stored.float() + (1 << self.bits - 1)


@dataclass(frozen=True, slots=True)
class FloatScheme:
    """8-bit floats."""

    scales: Scales

    def format(self, depth: int) -> Format:
        return fp8_format(depth, self.scales.group)

    def parts(self, outputs: int, depth: int) -> Mapping[str, Part]:
        return {
            "weight": Part((FP8_KIND,), ((outputs, depth),)),
            "weight_scale": Part(FLOATS, self.scales.shapes(outputs, depth)), **OF_ACTIVATIONS}

    def matrix(self, layer: Layer) -> QuantisedMatrix:
        scales = self.scales.of_outputs(layer.numbers("weight_scale"), layer.outputs, layer.depth)
        return fp8_matrix(layer, "weight_scale", scales, self.scales.group)

"""compressed-tensors, the format of llm-compressor (github.com/vllm-project/compressed-tensors).

`config_groups` give modules a scheme by name, expression or class; `ignore` names modules that stay as they are.

    pack-quantized         weight_packed [outputs, words] int32, weight_scale, weight_shape; perhaps weight_zero_point
                           [words of outputs, groups] int32 and weight_g_idx [depth]
    int-quantized          weight int8, weight_scale; perhaps weight_zero_point int8
    float-quantized        weight E4M3, weight_scale
    naive-quantized        one of the last two
    mxfp4-pack-quantized   weight_packed uint8, weight_scale uint8: see `mxfp4.py`

A scale belongs to the matrix (`tensor`), an output (`channel`), a group of an output's inputs or a block.  Scales of
activations are not used: activations are quantized token by token while they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import Spellings, canonical
from slotwise.compute.model.quantization.fp8 import KIND as FP8_KIND
from slotwise.compute.model.quantization.fp8 import fp8_format, fp8_matrix, of_rows, read_pair
from slotwise.compute.model.quantization.mxfp4 import GROUP as MXFP4_GROUP
from slotwise.compute.model.quantization.mxfp4 import MXFP4Scheme
from slotwise.compute.model.quantization.patterns import REGEX, matches, read_expressions, read_names, read_targets
from slotwise.compute.model.quantization.scheme import (
    FLOATS,
    GROUPS,
    NUMBER,
    Affine,
    Scheme,
    Shape,
    StoredLayer,
    StoredPart,
    choice,
    groups_of,
    read_group,
    read_order,
    refuse_unknown,
    unpack,
    words_of,
)

TENSOR, CHANNEL, GROUP, BLOCK = "tensor", "channel", "group", "block"  # what has a scale
BYTE = 8
OF_ACTIVATIONS = {  # scales that may be there and are not used
    "input_scale": StoredPart(FLOATS, NUMBER, is_optional=True),
    "input_zero_point": StoredPart(("I8", FP8_KIND), NUMBER, is_optional=True)}


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

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        shapes = self.scales.shapes(outputs, depth)
        parts = {"weight_scale": StoredPart(FLOATS, shapes), **OF_ACTIVATIONS}
        if not self.is_packed:
            return parts | {
                "weight": StoredPart(("I8",), ((outputs, depth),)),
                "weight_zero_point": StoredPart(("I8",), shapes, is_optional=self.is_symmetric)}
        groups = groups_of(depth, self.scales.group)
        if not self.is_symmetric:
            parts["weight_zero_point"] = StoredPart(("I32",), ((words_of(outputs, self.bits), groups),))
        return parts | {
            "weight_packed": StoredPart(("I32",), ((outputs, words_of(depth, self.bits)),)),
            "weight_shape": StoredPart(("I64", "I32"), ((2,),)),
            "weight_g_idx": StoredPart(("I32", "I64"), ((depth,),), is_optional=not self.is_ordered)}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        scales = self.scales.of_outputs(layer.numbers("weight_scale"), layer.outputs, layer.depth)
        order = read_order(layer, "weight_g_idx", self.scales.group) if layer.has("weight_g_idx") else None
        codes = self._packed_codes(layer) if self.is_packed else self._codes(layer)
        return self._affine.matrix(layer, codes, "weight_scale", scales, self._zeros(layer), order)

    def _packed_codes(self, layer: StoredLayer) -> Callable[[int, int], Tensor]:
        if layer.tensor("weight_shape").tolist() != [layer.outputs, layer.depth]:
            raise layer.error("weight_shape", f"must be {[layer.outputs, layer.depth]}")
        words = layer.tensor("weight_packed")
        return lambda first, end: unpack(words[first:end], self.bits, layer.depth)

    def _codes(self, layer: StoredLayer) -> Callable[[int, int], Tensor]:
        weight, middle = layer.tensor("weight"), 1 << self.bits - 1

        def codes(first: int, end: int) -> Tensor:
            numbers = weight[first:end]
            if self.bits < BYTE and (numbers.amin() < -middle or numbers.amax() >= middle):
                raise layer.error("weight", f"holds integers of more than {self.bits} bits")
            return (numbers.view(torch.uint8) + middle) & ((1 << self.bits) - 1)

        return codes

    def _zeros(self, layer: StoredLayer) -> Tensor | None:
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

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        return {
            "weight": StoredPart((FP8_KIND,), ((outputs, depth),)),
            "weight_scale": StoredPart(FLOATS, self.scales.shapes(outputs, depth)), **OF_ACTIVATIONS}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        scales = self.scales.of_outputs(layer.numbers("weight_scale"), layer.outputs, layer.depth)
        return fp8_matrix(layer, "weight_scale", scales, self.scales.group)


NAME = "compressed-tensors"
PACKED, INTEGERS, FLOAT, NAIVE, MXFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
FORMATS = (PACKED, INTEGERS, FLOAT, NAIVE, MXFP4)
MIXED = "mixed-precision"  # each group has a format of its own
CLASS = "Linear"  # of the modules that hold weights, as a target names it
MAX_GROUPS = 64
ACTIVATION_BITS = (4, 8)
READ = frozenset(("config_groups", "format", "ignore", "quantization_status", "quant_method"))
RECORDED = frozenset(("global_compression_ratio", "version", "run_compressed", "dequantize", "use_optimized_inference"))
ARGUMENTS = frozenset((
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs"))


class CompressedTensors:
    """The quantization_config of quant_method `compressed-tensors`."""

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        sparsity = fields.section("sparsity_config")
        if sparsity.values and choice(sparsity, "format", None, "dense"):
            fields = Fields({**fields.values, "sparsity_config": None}, fields.where)
        refuse_unknown(fields, NAME, READ | RECORDED)
        choice(fields, "quantization_status", "compressed", "compressed", "frozen")  # which older files say
        groups = fields.section("config_groups")
        if not 1 <= len(groups.values) <= MAX_GROUPS:
            raise fields.error("config_groups", f"must hold 1 to {MAX_GROUPS} groups, not {len(groups.values)}")
        self._schemes: dict[str, Scheme] = {}
        for name in groups.values:
            group = groups.section(name)
            scheme = _read_scheme(group, _read_format(fields, group))
            self._schemes |= dict.fromkeys(map(canonical, read_names(group, "targets")), scheme)
        expressions = [target[len(REGEX):] for target in sorted(self._schemes) if target.startswith(REGEX)]
        self._expressions = read_expressions(groups, "targets", expressions)
        self._spell = spell
        self._is_ignored = read_targets(fields, "ignore", spell)
        bits = sorted({f"{scheme.format(1).bits}" for scheme in self._schemes.values()})
        self.description = f"{NAME}, {' and '.join(bits)} bits"

    def scheme(self, module: str) -> Scheme | None:
        """That of the module's name, else of the first expression in alphabetical order, else of its class."""
        if self._is_ignored(module) or self._is_ignored(CLASS):
            return None
        if module in self._schemes:
            return self._schemes[module]
        for pattern, expression in self._expressions.items():
            if matches(expression, module, self._spell):
                return self._schemes[REGEX + pattern]
        return self._schemes.get(CLASS)


def _read_format(fields: Fields, group: Fields) -> str:
    """A group's own format, else that of all."""
    if group.has("format"):
        return choice(group, "format", None, *FORMATS)
    return choice(fields, "format", None, *FORMATS)


def _read_scheme(group: Fields, kind: str) -> Scheme:
    """How one group of modules is stored in format `kind`."""
    refuse_unknown(group, NAME, ("targets", "weights", "input_activations", "format"))
    weights = group.section("weights")
    refuse_unknown(weights, NAME, ARGUMENTS)
    if not weights.values:
        raise group.error("weights", "is missing")
    if weights.flag("dynamic"):
        raise weights.error("dynamic", "must be false")
    _check_activations(group)
    is_float = choice(weights, "type", "int", "int", "float") == "float"
    if is_float is (kind in (PACKED, INTEGERS)) or (not is_float and kind in (FLOAT, MXFP4)):
        raise weights.error("type", f"{weights.text('type', default='int')} does not go with format {kind}")
    if is_float:
        return _float_scheme(weights, kind)
    scales, bits = _read_scales(weights), weights.integer("num_bits", default=BYTE)
    if bits not in (4, BYTE):
        raise weights.error("num_bits", f"must be 4 or {BYTE}, not {bits}")
    is_symmetric = weights.flag("symmetric", default=True)
    if scales.strategy == BLOCK or (scales.strategy == TENSOR and kind == PACKED and not is_symmetric):
        raise weights.error("strategy", f"{scales.strategy} is not supported for integers in format {kind}")
    is_ordered = weights.values.get("actorder") not in (None, False) and choice(
        weights, "actorder", None, "group", "dynamic", "weight", "static") in ("group", "dynamic")
    return IntegerScheme(bits, scales, is_symmetric, kind == PACKED, is_ordered)


def _float_scheme(weights: Fields, kind: str) -> Scheme:
    bits = 4 if kind == MXFP4 else BYTE
    if weights.integer("num_bits", default=BYTE) != bits:
        raise weights.error("num_bits", f"must be {bits} in format {kind}, not {weights.integer('num_bits')}")
    if not weights.flag("symmetric", default=True):
        raise weights.error("symmetric", "is false, which is not supported for floats")
    scales = _read_scales(weights)
    if kind != MXFP4:
        return FloatScheme(scales)
    if (scales.strategy, scales.group) != (GROUP, MXFP4_GROUP):
        raise weights.error("group_size", f"must be {MXFP4_GROUP} in format {kind}")
    return MXFP4Scheme("weight_packed", "weight_scale")


def _read_scales(weights: Fields) -> Scales:
    """What has a scale; where `strategy` is absent, the size of groups says it."""
    size = weights.integer("group_size", default=0, minimum=-1)
    strategy = choice(weights, "strategy", GROUP if size > 0 else CHANNEL if size else TENSOR,
                      TENSOR, CHANNEL, GROUP, BLOCK)
    if strategy == BLOCK:
        return Scales(strategy, *read_pair(weights, "block_structure"))
    if strategy == GROUP:
        group = read_group(weights, "group_size")
        if not group:
            raise weights.error("group_size", f"must be one of {GROUPS} with strategy group")
        return Scales(strategy, 1, group)
    return Scales(strategy, int(strategy == CHANNEL), 0)


def _check_activations(group: Fields) -> None:
    """Raises CheckpointError for activations of fewer bits than are known; their scales are not used."""
    activations = group.section("input_activations")
    refuse_unknown(activations, NAME, ARGUMENTS)
    if activations.values and activations.integer("num_bits", default=BYTE) not in ACTIVATION_BITS:
        raise activations.error("num_bits", f"must be 4 or {BYTE}, not {activations.integer('num_bits')}")

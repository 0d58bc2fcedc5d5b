"""compressed-tensors, the format of llm-compressor (github.com/vllm-project/compressed-tensors).

`config_groups` give modules a scheme by name, expression or class; `ignore` names those that stay as they are.

    pack-quantized         weight_packed [outputs, words] int32, weight_scale, weight_shape; perhaps weight_zero_point
                           [words of outputs, groups] int32 and weight_g_idx [depth]
    int-quantized          weight int8, weight_scale; perhaps weight_zero_point int8
    float-quantized        weight E4M3, weight_scale
    naive-quantized        one of the last two
    mxfp4-pack-quantized   weight_packed uint8, weight_scale uint8: see `mxfp4.py`

A scale belongs to the matrix (`tensor`), an output (`channel`), a group of an output's inputs or a block.  Scales of
activations are not used: activations are quantised token by token while they are multiplied.
"""

from __future__ import annotations

from slotwise.model.fields import Fields
from slotwise.model.names import Spellings, canonical
from slotwise.model.quantization.compressed_schemes import (
    BLOCK,
    BYTE,
    CHANNEL,
    GROUP,
    TENSOR,
    FloatScheme,
    IntegerScheme,
    Scales,
)
from slotwise.model.quantization.fp8 import read_pair
from slotwise.model.quantization.mxfp4 import GROUP as MXFP4_GROUP
from slotwise.model.quantization.mxfp4 import MXFP4Scheme
from slotwise.model.quantization.patterns import REGEX, matches, read_expressions, read_names, read_targets
from slotwise.model.quantization.scheme import GROUPS, Scheme, choice, read_group, refuse_unknown

NAME = "compressed-tensors"
PACKED, INTEGERS, FLOATS, NAIVE, MXFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
FORMATS = (PACKED, INTEGERS, FLOATS, NAIVE, MXFP4)
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
    if is_float is (kind in (PACKED, INTEGERS)) or (not is_float and kind in (FLOATS, MXFP4)):
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

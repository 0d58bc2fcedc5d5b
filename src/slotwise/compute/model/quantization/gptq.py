"""GPTQ (Frantar et al., 2023), as AutoGPTQ and GPTQModel store it.

    qweight   [depth * bits / 32, outputs]    words along the depth, lowest bits first
    qzeros    [groups, outputs * bits / 32]   zero points, less one in the first version of the format
    scales    [groups, outputs]
    g_idx     [depth]                         the group of each input (act-order, `desc_act`)
    bias      [outputs]                       zeros, which AutoGPTQ wrote for models without biases

    weight[o, i] = scales[g, o] * (qweight[i, o] - zero[g, o]),  g = g_idx[i]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import HEAD, Spellings
from slotwise.compute.model.quantization.patterns import matches, read_expressions
from slotwise.compute.model.quantization.scheme import (
    FLOATS,
    Affine,
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

BITS = (4, 8)

# Fields that tell how the weights were found, or how another program computes with them.
RECORDED = frozenset((
    "quant_method", "method", "true_sequential", "static_groups", "act_group_aware", "damp_percent",
    "damp_auto_increment", "mse", "model_name_or_path", "model_file_base_name", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "dataset", "exllama_config", "max_input_length", "model_seqlen",
    "module_name_preceding_first_block", "pad_token_id", "tokenizer", "use_cuda_fp16", "use_exllama",
    "disable_exllama", "meta", "backend", "parallel_packing", "quantizer"))
READ = frozenset((
    "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic", "pack_dtype",
    "modules_in_block_to_quantize", "is_marlin_format"))


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """One module's weight."""

    bits: int
    group: int  # inputs that share a scale; 0: all of a row
    is_symmetric: bool
    is_ordered: bool  # g_idx must be there
    zero_offset: int  # what is added to a stored zero point

    @property
    def _affine(self) -> Affine:
        return Affine(self.bits, self.group, has_zeros=not self.is_symmetric)

    def format(self, depth: int) -> Format:
        return self._affine.format(depth)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        groups = groups_of(depth, self.group)
        return {
            "qweight": StoredPart(("I32",), ((words_of(depth, self.bits), outputs),)),
            "qzeros": StoredPart(("I32",), ((groups, words_of(outputs, self.bits)),)),
            "scales": StoredPart(FLOATS, ((groups, outputs),)),
            "g_idx": StoredPart(("I32", "I64"), ((depth,),), is_optional=not self.is_ordered),
            "bias": StoredPart(FLOATS, ((outputs,),), is_optional=True)}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        words, zeros = layer.tensor("qweight"), self._zeros(layer)
        if layer.has("bias") and layer.tensor("bias").any():
            raise layer.error("bias", "is not zero, but the model has no bias there")

        def codes(first: int, end: int) -> Tensor:
            return unpack(words[:, first:end].t(), self.bits, layer.depth)

        order = read_order(layer, "g_idx", self.group) if layer.has("g_idx") else None
        return self._affine.matrix(layer, codes, "scales", layer.numbers("scales").t(), zeros.t(), order)

    def _zeros(self, layer: StoredLayer) -> Tensor:
        """`[groups, outputs]`.  A zero point of 0 was stored as -1 in the first version, of which its bits remain."""
        stored = unpack(layer.tensor("qzeros"), self.bits, layer.outputs)
        zeros = (stored + self.zero_offset) & ((1 << self.bits) - 1)
        if self.is_symmetric and not (zeros == 1 << self.bits - 1).all():
            raise layer.error("qzeros", "holds other zero points than the middle, but the config says sym")
        return zeros


class GPTQ:
    """The quantization_config of quant_method `gptq`."""

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "GPTQ", RECORDED | READ)
        if fields.flag("is_marlin_format"):
            raise fields.error("is_marlin_format", "is true, which is not supported: serve a checkpoint of format gptq")
        name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
        version = choice(fields, name, "gptq", "gptq", "gptq_v2")
        choice(fields, "pack_dtype", "int32", "int32")
        base = GPTQScheme(0, 128, is_symmetric=True, is_ordered=False, zero_offset=int(version == "gptq"))
        self._scheme = _read_scheme(fields, base)
        self._has_head = fields.flag("lm_head")
        self._only = _read_modules(fields)
        self._exceptions = _read_dynamic(fields, self._scheme)
        self._spell = spell
        self.description = f"GPTQ, {self._scheme.bits} bits"

    def scheme(self, module: str) -> GPTQScheme | None:
        is_head = module == HEAD
        if is_head and not self._has_head:
            return None
        if self._only and not is_head and not any(module.endswith(f".{each}") for each in self._only):
            return None
        return next((scheme for names, scheme in self._exceptions if matches(names, module, self._spell)),
                    self._scheme)


def _read_scheme(fields: Fields, base: GPTQScheme) -> GPTQScheme:
    """`base`, whose `bits` 0 have no default, with what `fields` say."""
    bits = fields.integer("bits", default=base.bits or None)
    if bits not in BITS:
        raise fields.error("bits", f"must be {' or '.join(map(str, BITS))}, not {bits}")
    return replace(
        base, bits=bits, group=read_group(fields, "group_size", default=base.group or -1),
        is_symmetric=fields.flag("sym", default=base.is_symmetric),
        is_ordered=fields.flag("desc_act", default=base.is_ordered))


def _read_modules(fields: Fields) -> frozenset[str]:
    """The ends of the names of the modules that are quantized; none: all are."""
    lists = fields.values.get("modules_in_block_to_quantize") or []
    if not isinstance(lists, list) or not all(
            isinstance(each, list) and all(isinstance(name, str) for name in each) for each in lists):
        raise fields.error("modules_in_block_to_quantize", f"must be lists of names, not {lists!r:.40}")
    return frozenset(name for each in lists for name in each)


def _read_dynamic(fields: Fields, base: GPTQScheme) -> list[tuple[re.Pattern[str], GPTQScheme | None]]:
    """Exceptions by expression, in their order: `-:` leaves modules as they are, others change what they name."""
    section = fields.section("dynamic")
    plain = {name: name[2:] if name[:2] in ("-:", "+:") else name for name in section.values}
    expressions = read_expressions(fields, "dynamic", plain.values())
    found: list[tuple[re.Pattern[str], GPTQScheme | None]] = []
    for name, pattern in plain.items():
        changed = section.section(name)
        refuse_unknown(changed, "GPTQ", ("bits", "group_size", "desc_act", "sym", *RECORDED))
        found.append((expressions[pattern], None if name.startswith("-:") else _read_scheme(changed, base)))
    return found

"""Weights of bitsandbytes: NF4 (QLoRA, Dettmers et al., 2023) and int8 (LLM.int8(), Dettmers et al., 2022).

    weight                     [outputs * depth / 2, 1] uint8: two codes a byte, the first in the high half
    weight.quant_map           [16], the levels
    weight.absmax              [blocks] float32, or with double quantization uint8, and
    weight.nested_absmax       [blocks / 256],  weight.nested_quant_map [256]
    weight.quant_state...      JSON as bytes: block sizes, shape, nested_offset

    weight[i] = quant_map[code[i]] * absmax[i / 64]
    absmax[b] = nested_quant_map[absmax[b]] * nested_absmax[b / 256] + nested_offset

    weight   [outputs, depth] int8,  SCB [outputs]:  weight[o, i] = code[o, i] * SCB[o] / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Factors, Format, QuantizedMatrix, Rows
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import HEAD, Spellings
from slotwise.compute.model.quantization.patterns import read_skipped
from slotwise.compute.model.quantization.scheme import (
    NUMBER,
    StoredLayer,
    StoredPart,
    check_range,
    choice,
    refuse_unknown,
)

BLOCK = 64  # where the config does not say it: it never does, but each layer's state must
NESTED_BLOCK = 256
STATE = "weight.quant_state.bitsandbytes__nf4"
MAX_STATE_BYTES = 4096
ABSMAX, NESTED, NESTED_MAP = "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"
A_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
READ = frozenset((
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype", "llm_int8_skip_modules",
    "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"))


@dataclass(frozen=True, slots=True)
class NF4Scheme:
    """One module's weight."""

    is_nested: bool  # scales are quantized, too

    def format(self, depth: int) -> Format:
        return Format(4, BLOCK, torch.float32, levels=NF4)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        blocks = -(-outputs * depth // BLOCK)
        half = -(-outputs * depth // 2)
        parts = {
            "weight": StoredPart(("U8",), ((half, 1), (1, half))),
            "weight.quant_map": StoredPart(("F32",), ((len(NF4),),)),
            STATE: StoredPart(("U8",)),
            ABSMAX: StoredPart(("U8" if self.is_nested else "F32",), ((blocks,),))}
        if self.is_nested:
            parts[NESTED] = StoredPart(("F32",), ((-(-blocks // NESTED_BLOCK),),))
            parts[NESTED_MAP] = StoredPart(("F32",), ((256,),))
        return parts

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        if layer.depth % BLOCK:
            raise layer.error("weight", f"has {layer.depth} inputs: {BLOCK} must divide them")
        offset = self._read_state(layer)
        if not torch.equal(layer.tensor("weight.quant_map"), torch.tensor(NF4)):
            raise layer.error("weight.quant_map", "holds other levels than those of NF4")
        scales = self._scales(layer, offset).view(layer.outputs, -1)
        packed = layer.tensor("weight").view(layer.outputs, -1)

        def read(first: int, end: int) -> Rows:
            pairs = packed[first:end]
            return Rows(torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1), Factors(scales[first:end]))

        check_range(layer, ABSMAX, scales, max(NF4))
        return QuantizedMatrix(self.format(layer.depth), layer.outputs, layer.depth, read)

    def _scales(self, layer: StoredLayer, offset: float) -> Tensor:
        if not self.is_nested:
            return layer.numbers(ABSMAX)
        steps, factors = layer.numbers(NESTED_MAP)[layer.tensor(ABSMAX).int()], layer.numbers(NESTED)
        return steps * factors.repeat_interleave(NESTED_BLOCK)[: len(steps)] + offset

    def _read_state(self, layer: StoredLayer) -> float:
        """Checks what the layer's own description says; returns what is added to scales."""
        stored = layer.tensor(STATE)
        try:
            if stored.numel() > MAX_STATE_BYTES:
                raise ValueError("too long")
            values = json.loads(bytes(stored.flatten().tolist()))
            if not isinstance(values, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise layer.error(STATE, f"is not a JSON object ({error!s:.60}): download the checkpoint again") from error
        state = Fields(values, f"{layer.where}: {layer.name}.{STATE}")
        choice(state, "quant_type", None, "nf4")
        _expect(state, "blocksize", BLOCK)
        _expect(state, "shape", [layer.outputs, layer.depth])
        if not self.is_nested:
            state.refuse(("nested_blocksize", "nested_offset"), "is set, but the config has no double quantization")
            return 0.0
        _expect(state, "nested_blocksize", NESTED_BLOCK)
        return state.number("nested_offset", minimum=-1e30)


def _expect(state: Fields, name: str, value: object) -> None:
    if state.values.get(name) != value:
        raise state.error(name, f"must be {value}, not {state.values.get(name)!r:.40}")


@dataclass(frozen=True, slots=True)
class Int8Scheme:
    """One module's weight."""

    def format(self, depth: int) -> Format:
        return Format(8, 0, torch.float32, zero=128)

    def parts(self, outputs: int, depth: int) -> Mapping[str, StoredPart]:
        return {
            "weight": StoredPart(("I8",), ((outputs, depth),)),
            "SCB": StoredPart(("F32",), ((outputs,), (outputs, 1))),
            "weight_format": StoredPart(("U8",), NUMBER, is_optional=True)}

    def matrix(self, layer: StoredLayer) -> QuantizedMatrix:
        if layer.has("weight_format") and layer.tensor("weight_format").any():
            raise layer.error("weight_format", "is not 0, which stands for rows")
        weight, scales = layer.tensor("weight").view(torch.uint8), layer.numbers("SCB").view(-1, 1) * A_STEP

        def read(first: int, end: int) -> Rows:
            return Rows(weight[first:end] ^ 128, Factors(scales[first:end]))

        check_range(layer, "SCB", scales, 256)
        return QuantizedMatrix(self.format(layer.depth), layer.outputs, layer.depth, read)


class BitsAndBytes:
    """The quantization_config of quant_method `bitsandbytes`."""

    def __init__(self, fields: Fields, spell: Spellings) -> None:
        """Raises CheckpointError for fields that are malformed or not supported."""
        refuse_unknown(fields, "bitsandbytes", READ)
        is_4_bits, is_8_bits = (
            fields.flag(f"load_in_{bits}bit") or fields.flag(f"_load_in_{bits}bit") for bits in (4, 8))
        if is_4_bits == is_8_bits:
            raise fields.error("load_in_4bit", "or load_in_8bit must be true, and not both")
        if fields.flag("llm_int8_has_fp16_weight"):
            raise fields.error("llm_int8_has_fp16_weight", "is true, which is not supported")
        if is_4_bits:
            choice(fields, "bnb_4bit_quant_type", "fp4", "nf4")
            choice(fields, "bnb_4bit_quant_storage", "uint8", "uint8")
        self._scheme = NF4Scheme(fields.flag("bnb_4bit_use_double_quant")) if is_4_bits else Int8Scheme()
        self._is_skipped = read_skipped(fields, spell, "llm_int8_skip_modules")
        self._has_head = fields.has("llm_int8_skip_modules")  # without a list the head is one of them
        self.description = f"bitsandbytes, {'NF4' if is_4_bits else 'int8'}"

    def scheme(self, module: str) -> NF4Scheme | Int8Scheme | None:
        is_dense = self._is_skipped(module) or (module == HEAD and not self._has_head)
        return None if is_dense else self._scheme

"""Quantization methods by `quant_method`, and a checkpoint's tensors with each quantized weight as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, stacked
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.names import Spellings, spellings
from slotwise.compute.model.quantization.awq import AWQ
from slotwise.compute.model.quantization.bitnet import BitNet
from slotwise.compute.model.quantization.bitsandbytes import BitsAndBytes
from slotwise.compute.model.quantization.compressed_tensors import CompressedTensors
from slotwise.compute.model.quantization.fp8 import FP8
from slotwise.compute.model.quantization.gptq import GPTQ
from slotwise.compute.model.quantization.mxfp4 import FORMAT, GROUP, MXFP4, MXFP4Scheme
from slotwise.compute.model.quantization.scheme import FLOATS, Quantization, Scheme, Shape, StoredLayer, StoredPart
from slotwise.compute.model.stored_tensors import StoredTensor, TensorSource
from slotwise.errors import CheckpointError

METHODS: dict[str, Callable[[Fields, Spellings], Quantization]] = {
    "awq": AWQ, "gptq": GPTQ, "compressed-tensors": CompressedTensors, "fp8": FP8, "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4, "bitnet": BitNet}
FIELD = "quantization_config"


def read_quantization(config: Fields) -> Quantization | None:
    """How the checkpoint of this config.json is quantized; None: it is not.

    Raises CheckpointError for another method than those of `METHODS`, and for a field that is malformed or whose
    meaning is not implemented.
    """
    fields = config.section(FIELD)
    if not fields.values:
        return None
    method = fields.text("quant_method")
    if method not in METHODS:
        raise fields.error("quant_method", f"must be one of {', '.join(METHODS)}, not {method!r:.40}: "
                           "serve the checkpoint that it was made from")
    return METHODS[method](fields, spellings((config.texts("architectures") or ("",))[0]))


WEIGHT = ".weight"  # how the names of products' weights end
MATRIX_DIMENSIONS = 2  # dimensions
TABLES = ("model.embed_tokens", "model.embed_positions")  # matrices that are not products: no method quantizes them
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # how the names of gpt-oss' experts end
ROUTERS = ("gate", "router", "shared_expert_gate")  # that configs leave out of their lists, and methods as they are
SHOWN = 3  # tensors in an error before "and n more"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight `[outputs, depth]` whose parts are tensors of a file."""

    name: str  # of its module
    where: str  # the checkpoint, for messages
    kind: str
    shape: Shape
    scheme: Scheme
    parts: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def format(self) -> Format:
        return self.scheme.format(self.shape[1])

    def rows(self, first: int, end: int) -> Tensor:
        raise TypeError(f"{self.name} has no plain numbers")

    def matrix(self) -> QuantizedMatrix:
        outputs, depth = self.shape
        parts = {name: part.rows(0, part.shape[0] if part.shape else 1) for name, part in self.parts.items()}
        return self.scheme.matrix(StoredLayer(self.name, self.where, outputs, depth, parts))


@dataclass(frozen=True, slots=True)
class MXFP4Experts:
    """The experts of gpt-oss, `[experts, depth, outputs]`."""

    name: str
    where: str  # the checkpoint, for messages
    shape: Shape
    blocks: StoredTensor  # [experts, outputs, depth / 32, 16]
    scales: StoredTensor
    kind: str = "MXFP4"
    format: Format = FORMAT

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def rows(self, first: int, end: int) -> Tensor:
        """Experts `first ... end - 1` as plain numbers: bfloat16 holds them exactly."""
        experts = range(first, min(end, self.shape[0]))
        return torch.stack([self._expert(place).dequantized().bfloat16().t() for place in experts])

    def matrix(self) -> QuantizedMatrix:
        """All experts, one behind the other along their outputs."""
        whole = stacked([self._expert(place) for place in range(self.shape[0])])
        assert isinstance(whole, QuantizedMatrix)
        return whole

    def _expert(self, place: int) -> QuantizedMatrix:
        """One of them, `[outputs, depth]`, of which only the outputs that are asked for are read."""
        _, depth, outputs = self.shape

        def read(first: int, end: int) -> Rows:
            parts = {"blocks": self.blocks.rows(place, place + 1)[0, first:end],
                     "scales": self.scales.rows(place, place + 1)[0, first:end]}
            layer = StoredLayer(self.name, self.where, end - first, depth, parts)
            return MXFP4Scheme("blocks", "scales").matrix(layer).read(0, end - first)

        return QuantizedMatrix(FORMAT, outputs, depth, read)


def _see_experts(source: TensorSource, tensors: dict[str, StoredTensor], name: str, shape: Shape) -> list[str]:
    """Sees blocks and scales of experts as one tensor; returns those of them that are missing."""
    count, depth, outputs = shape
    groups = -(-depth // GROUP)
    parts = {f"{name}_blocks": StoredPart(("U8",), ((count, outputs, groups, GROUP // 2),)),
             f"{name}_scales": StoredPart(("U8", "F8_E8M0"), ((count, outputs, groups),))}
    missing = [part for part in parts if part not in source.tensors]
    if missing:
        return missing
    for part, described in parts.items():
        _check_part(source, part, described)
    blocks, scales = (tensors.pop(part) for part in parts)
    tensors[name] = MXFP4Experts(name, source.where, shape, blocks, scales)
    return []


def with_quantized(source: TensorSource, quantization: Quantization, expected: Mapping[str, Shape]) -> TensorSource:
    """`source` with the weights that `quantization` says are quantized in place of their parts.

    `expected` are the names and shapes of all tensors that the model reads.

    Raises CheckpointError when parts are missing, or have another shape or type than the config says.
    """
    tensors, missing = dict(source.tensors), []
    for name, shape in expected.items():
        if isinstance(quantization, MXFP4) and name.endswith(EXPERTS):
            missing += _see_experts(source, tensors, name, shape)
            continue
        module = name.removesuffix(WEIGHT)
        is_product = len(shape) == MATRIX_DIMENSIONS and name.endswith(WEIGHT) and module not in TABLES
        is_plain_router = module.rpartition(".")[2] in ROUTERS and name in tensors and tensors[name].kind in FLOATS
        scheme = quantization.scheme(module) if is_product and not is_plain_router else None
        if scheme is None:
            continue
        found = {}
        for part, described in scheme.parts(*shape).items():
            stored = f"{module}.{part}"
            if stored in source.tensors and (stored == name or stored not in expected):
                _check_part(source, stored, described)
                found[part] = tensors.pop(stored)
            elif not described.is_optional:
                missing.append(stored)
        tensors[name] = QuantizedTensor(module, source.where, quantization.description, shape, scheme, found)
    if missing:
        shown = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        raise CheckpointError(f"{source.where} lacks {len(missing)} tensors of quantized weights: {shown}; download "
                              f"the checkpoint again, or check that {source.described_by} belongs to it")
    return replace(source, tensors=tensors)


def _check_part(source: TensorSource, name: str, part: StoredPart) -> None:
    tensor = source.tensors[name]
    if part.shapes and tensor.shape not in part.shapes:
        raise CheckpointError(f"{source.where}: {name} has shape {list(tensor.shape)}, but {source.described_by} asks "
                              f"for {' or '.join(str(list(shape)) for shape in part.shapes)}")
    if tensor.kind not in part.kinds:
        raise CheckpointError(f"{source.where}: {name} is stored as {tensor.kind}, but {source.described_by} asks for "
                              f"{' or '.join(part.kinds)}")

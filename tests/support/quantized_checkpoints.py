"""Quantized checkpoints in the formats of Hugging Face's hub, and what the packages that define them make of them.

A writer gets a weight `[outputs, depth]` in float32, and returns the tensors that a file has in its place, by what
follows the module's name and a dot, and the weight that the format's own package dequantizes from them.  GPTQ's and
AWQ's packages need a GPU: their published formulas stand here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}  # of 32, 64, 128


class Kind(NamedTuple):
    config: dict[str, Any]  # quantization_config
    write: Writer


def _group(weight: Tensor, group: int) -> Tensor:
    return weight.unflatten(1, (-1, group if group > 0 else weight.shape[1]))


def _codes(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[outputs, depth]`, scales and zero points `[outputs, groups]`, rounded as every method begins."""
    groups, most = _group(weight, group), (1 << bits) - 1
    if symmetric:
        scales, zeros = groups.abs().amax(2) * 2 / most, torch.full(groups.shape[:2], 1 << bits - 1)
    else:
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(0, most).int()
    scales = scales.half()
    codes = (groups / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return codes.clamp(0, most).int().flatten(1), scales, zeros


def _words(codes: Tensor, bits: int) -> Tensor:
    """`[rows, n]` as words of 32 bits, lowest first: `[rows, n * bits / 32]` int32."""
    each = 32 // bits
    words = sum(codes[:, place::each].long() << bits * place for place in range(each))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()  # type: ignore[arg-type]


def gptq(bits: int, group: int, *, symmetric: bool = True, ordered: bool = False, version: str = "gptq") -> Kind:
    """Frantar et al.; act-order sorts inputs by how large they are, and groups them in that order."""

    def write(weight: Tensor) -> Written:
        depth = weight.shape[1]
        size = group if group > 0 else depth
        shuffled = torch.randperm(depth, generator=torch.Generator().manual_seed(depth))
        order = shuffled if ordered else torch.arange(depth)
        codes, scales, zeros = _codes(weight[:, order], bits, group, symmetric=symmetric)
        codes = codes[:, order.argsort()]
        group_of = order.argsort() // size
        stored = (zeros - int(version == "gptq")) & ((1 << bits) - 1)
        tensors = {
            "qweight": _words(codes, bits).t().contiguous(), "qzeros": _words(stored.t(), bits),
            "scales": scales.t().contiguous(), "g_idx": group_of.int()}
        return tensors, scales.float()[:, group_of] * (codes - zeros[:, group_of])

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": ordered,
              "checkpoint_format": version, "damp_percent": 0.1, "true_sequential": True, "lm_head": False}
    return Kind(config, write)


def awq(group: int) -> Kind:
    """Lin et al., as AutoAWQ packs: eight outputs a word, in the order 0 2 4 6 1 3 5 7."""

    def pack(numbers: Tensor) -> Tensor:
        return _words(numbers.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    def write(weight: Tensor) -> Written:
        codes, scales, zeros = _codes(weight, 4, group, symmetric=False)
        tensors = {"qweight": pack(codes.t()), "qzeros": pack(zeros.t()), "scales": scales.t().contiguous()}
        return tensors, ((_group(codes, group) - zeros.unsqueeze(2)) * scales.float().unsqueeze(2)).flatten(1)

    return Kind({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": None}, write)


def compressed(name: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, *,
               static: bool = False) -> Kind:
    """compressed-tensors packs and dequantizes itself."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    compressor = BaseCompressor.get_value_from_registry(name)
    arguments = QuantizationArgs(**weights)

    def write(weight: Tensor) -> Written:
        weight = weight.bfloat16()
        rows = min(len(weight), {"block": 128, "tensor": len(weight)}.get(arguments.strategy, 1))
        columns = {"group": arguments.group_size, "block": 128}.get(arguments.strategy, weight.shape[1])
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
        scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), arguments)
        if arguments.strategy == "tensor":
            scale, zero = scale.flatten(), zero.flatten()
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        if name == "mxfp4-pack-quantized":  # which stores the power of two below a scale
            scale = 2.0 ** scale.log2().ceil()
        tensors = compressor.compress(
            {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}, scheme)
        whole = compressor.decompress({
            part: tensor.float() if part == "weight_scale" and tensor.is_floating_point() else tensor
            for part, tensor in tensors.items()}, scheme)["weight"]
        if static:
            tensors["input_scale"] = torch.tensor([0.1])
        return {part: tensor.contiguous() for part, tensor in tensors.items()}, whole.float()

    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json()), "output_activations": None,
             "input_activations": activations}
    return Kind({"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
                 "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}, write)


def fp8(block: list[int] | None, *, static: bool = False) -> Kind:
    """Blocks as DeepSeek-V3's, dequantized by transformers; without them one scale for a matrix."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def write(weight: Tensor) -> Written:
        rows, columns = block or weight.shape
        rows = min(rows, len(weight))
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
        scales = (blocks.abs().amax((2, 3)) / 448).contiguous()
        stored = (blocks / scales[:, :, None, None]).transpose(1, 2).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors = {"weight": stored, "weight_scale_inv": scales if block else scales.reshape(())}
        if static:
            tensors["activation_scale"] = torch.tensor(0.02)
        return tensors, Fp8Dequantize(None)._dequantize_one(stored, scales)

    return Kind({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block,
                 "activation_scheme": "static" if static else "dynamic", "modules_to_not_convert": ["lm_head"]}, write)


def nf4(*, nested: bool) -> Kind:
    """bitsandbytes quantizes and dequantizes itself."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def write(weight: Tensor) -> Written:
        packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        parts = {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, dequantize_4bit(packed, state).float()

    return Kind({"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
                 "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested,
                 "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
                 "llm_int8_skip_modules": None, "llm_int8_has_fp16_weight": False}, write)


def int8() -> Kind:
    """LLM.int8(), as bitsandbytes writes it."""
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    def write(weight: Tensor) -> Written:
        codes, largest, _ = int8_vectorwise_quant(weight.half())
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, int8_vectorwise_dequant(codes, largest)

    return Kind({"quant_method": "bitsandbytes", "_load_in_4bit": False, "_load_in_8bit": True, "load_in_4bit": False,
                 "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0}, write)


def _integers(bits: int, strategy: str, group: int | None = None, *, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}


def _floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
def bitnet(linear_class: str) -> Kind:
    """Ternary weights, as transformers packs them."""

    def write(weight: Tensor) -> Written:
        from transformers.integrations.bitnet import pack_weights

        scale = weight.abs().mean()
        codes = (weight / scale).round().clamp(-1, 1)
        stored = 1 / scale if linear_class == "bitlinear" else scale
        return {"weight": pack_weights(codes.clone()), "weight_scale": stored.view(1)}, codes * scale

    return Kind({"quant_method": "bitnet", "linear_class": linear_class}, write)


KINDS: dict[str, Callable[[], Kind]] = {
    "BitNet": lambda: bitnet("bitlinear"),
    "BitNet, multiplied": lambda: bitnet("autobitlinear"),
    "gptq 4": lambda: gptq(4, 128),
    "gptq 4, act-order": lambda: gptq(4, 32, ordered=True),
    "gptq 4, asymmetric": lambda: gptq(4, 64, symmetric=False, ordered=True),
    "gptq 4, version 2": lambda: gptq(4, 128, symmetric=False, version="gptq_v2"),
    "gptq 8": lambda: gptq(8, 32, symmetric=False),
    "gptq 8, rows": lambda: gptq(8, -1),
    "awq": lambda: awq(128),
    "awq, rows": lambda: awq(-1),
    "W4A16": lambda: compressed("pack-quantized", _integers(4, "group", 128)),
    "W4A16, asymmetric": lambda: compressed("pack-quantized", _integers(4, "group", 32, symmetric=False)),
    "W8A16": lambda: compressed("pack-quantized", _integers(8, "channel")),
    "W8A8": lambda: compressed("int-quantized", _integers(8, "channel"), DYNAMIC),
    "W8A8, static": lambda: compressed("int-quantized", _integers(8, "tensor"), STATIC, static=True),
    "W8A8, asymmetric": lambda: compressed("int-quantized", _integers(8, "channel", symmetric=False), DYNAMIC),
    "FP8, dynamic": lambda: compressed("float-quantized", _floats("channel"), DYNAMIC | {"type": "float"}),
    "FP8, static": lambda: compressed("float-quantized", _floats("tensor"), STATIC | {"type": "float"}, static=True),
    "FP8, blocks": lambda: compressed("float-quantized", _floats("block", block_structure=[128, 128])),
    "MXFP4": lambda: compressed("mxfp4-pack-quantized", _floats("group", group_size=32) | {"num_bits": 4}),
    "DeepSeek's FP8": lambda: fp8([128, 128]),
    "fp8, static": lambda: fp8(None, static=True),
    "NF4": lambda: nf4(nested=False),
    "NF4, double": lambda: nf4(nested=True),
    "LLM.int8()": int8,
}


def is_quantized(name: str) -> bool:
    """Whether quantizers take the tensor: the products of layers, and not the head."""
    return name.endswith("_proj.weight")


def quantize(dense: Path, folder: Path, kind: Kind) -> dict[str, Tensor]:
    """Writes the checkpoint `dense` to `folder`, quantized; returns all its weights as dequantized by their package."""
    shutil.copytree(dense, folder)
    weights = load_file(folder / "model.safetensors")
    stored, whole = {}, {}
    for name, weight in weights.items():
        if not is_quantized(name):
            stored[name] = whole[name] = weight
            continue
        module = name.removesuffix(".weight")
        parts, whole[name] = kind.write(weight.float())
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    save(stored, folder)
    configure(folder, kind.config)
    return whole


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


def configure(folder: Path, config: Any) -> None:
    """Sets quantization_config; ... takes it out."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": config}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))

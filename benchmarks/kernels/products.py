"""Times the four products of a layer in bfloat16 and with quantized weights, by every implementation.

Caches are cold: each call reads another of a model's layers.  Prints microseconds for a layer's four products together.
Beside those of GGUF's types it prints at which share of the rate of reading memory their packed bytes were read; that
rate is measured by the kernels' own threads right before and right after each figure.

    python -m benchmarks.kernels products --rows 1 16 64 512
    python -m benchmarks.kernels products --shape qwen3-0.6b --layers 12 --rows 1 2 4 8 --ways blocks --output FILE
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.commands import parser_of
from torch import Tensor

from slotwise.compose.machine import read_rate
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.cpu.products.linear import tiled_linear
from slotwise.compute.kernels.cpu.products.linear_bf16 import bf16_linear, has_bf16_gemm
from slotwise.compute.kernels.cpu.products.linear_fp16 import fp16_linear, has_fp16_gemm
from slotwise.compute.kernels.cpu.products.onednn import onednn_linear
from slotwise.compute.kernels.cpu.products.packing import Packing
from slotwise.compute.kernels.interface import Linear
from slotwise.compute.kernels.matrix import QuantizedMatrix
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES
from slotwise.measure.bench.results import environment, write_json

SHAPES = {  # the products of a layer, [out, in], and the number of layers
    "smollm2-135m": (((960, 576), (576, 576), (3072, 576), (576, 1536)), 30),
    "qwen3-0.6b": (((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 28),
}
READ_SECONDS = 0.1  # of measuring the read rate
ROUND_SECONDS = 0.3  # of measuring a type of GGUF
FEW = 512  # rows, from which on one round is enough
SEED = 0
KERNELS = CpuKernels()
TEAM = KERNELS.launcher
Inputs = dict[int, list[Tensor]]
"""By the number of rows, what each product of a layer gets."""
Figure = dict[str, Any]


def today(weight: Tensor) -> Linear:
    return KERNELS.linear(weight)


def widened(weight: Tensor) -> Linear:
    """bfloat16 widened to float32, as on processors without smaller products."""
    return tiled_linear(weight, None, TEAM)


def halves(weight: Tensor) -> Linear:
    """bfloat16 in half precision."""
    return fp16_linear(weight, None, TEAM)


def pairs(weight: Tensor) -> Linear:
    """bfloat16 as it is, by instructions that multiply its pairs."""
    return bf16_linear(weight, None, TEAM)


def by_tiles(weight: Tensor) -> Linear:
    """bfloat16 as it is, by AMX."""
    return bf16_linear(weight, None, TEAM, path="amx")


def by_torch(weight: Tensor) -> Linear:
    """bfloat16 as oneDNN packs it."""
    return onednn_linear(weight, None)


def own_int8(weight: Tensor) -> Linear:
    return Packing(TEAM, "int8", "").linear(weight, None)


def own_int4(weight: Tensor) -> Linear:
    return Packing(TEAM, "int4", "").linear(weight, None)


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[out, in]` and scales `[out]`."""
    scales = weight.float().abs().amax(1) / 127
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


def per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[tokens, in]` and scales `[tokens, 1]`."""
    scales = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / scales).round().to(torch.int8), scales


def int_mm(weight: Tensor) -> Linear:
    """`torch._int_mm`; 32 rows at least."""
    steps, scales = per_channel(weight)
    transposed = steps.t()

    def product(x: Tensor) -> Tensor:
        quantized, own = per_token(x)
        return (torch._int_mm(quantized, transposed) * own * scales).to(x.dtype)

    return product


def fbgemm(weight: Tensor) -> Linear:
    """`quantized.linear_dynamic`, with float32 outside; 7-bit activations where the processor lacks VNNI."""
    steps, scales = per_channel(weight)
    stored = torch._make_per_channel_quantized_tensor(steps, scales.double(), torch.zeros(len(steps)).long(), 0)
    packed = torch.ops.quantized.linear_prepack(stored, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed, True).to(x.dtype)


def onednn(weight: Tensor) -> Linear:
    """`onednn.qlinear_pointwise`; one scale for all tokens of a step, the only form it supports."""
    steps, scales = per_channel(weight)
    packed = torch.ops.onednn.qlinear_prepack(steps, None)
    zeros = torch.zeros(len(steps), dtype=torch.long)
    apply = torch.ops.onednn.qlinear_pointwise

    def product(x: Tensor) -> Tensor:
        scale = float(x.abs().max()) / 127
        unsigned = ((x.float() / scale).round() + 128).to(torch.uint8)
        return apply(unsigned, scale, 128, packed, scales, zeros, None, 1.0, 0, x.dtype, "none", [], "")

    return product


def int8pack(weight: Tensor) -> Linear:
    """`torch._weight_int8pack_mm`: bfloat16 activations."""
    steps, scales = per_channel(weight)
    scales = scales.to(weight.dtype)
    return lambda x: torch._weight_int8pack_mm(x, steps, scales)


def int4pack(weight: Tensor) -> Linear:
    """`torch._weight_int4pack_mm_for_cpu`: bfloat16 activations, groups of 64."""
    groups = weight.float().unflatten(1, (-1, 64))
    scales = groups.abs().amax(2) / 7
    steps = ((groups / scales[..., None]).round() + 8).clamp_(0, 15).flatten(1).to(torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(steps, 1)
    told = torch.stack((scales, torch.zeros_like(scales)), dim=2).transpose(0, 1).contiguous().to(weight.dtype)
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, 64, told)


def dyn_quant(weight: Tensor) -> Linear:
    """`torch._dyn_quant_matmul_4bit`: groups of 64, float32 outside."""
    outputs, depth = weight.shape
    groups = weight.float().unflatten(1, (-1, 64))
    scales = groups.abs().amax(2) / 7
    steps = ((groups / scales[..., None]).round() + 8).clamp_(0, 15).flatten(1).to(torch.uint8)
    packed = torch._dyn_quant_pack_4bit_weight(
        steps[:, 1::2] << 4 | steps[:, ::2], scales, None, 64, depth, outputs)
    return lambda x: torch._dyn_quant_matmul_4bit(x.float(), packed, 64, depth, outputs).to(x.dtype)


def blocks(name: str, weight: Tensor) -> QuantizedMatrix:
    """A matrix of the weight's shape in a type of GGUF, with random codes.

    Raises:
        ValueError: its rows are not whole blocks.
    """
    outputs, depth = weight.shape
    kind = BLOCK_TYPES[name]
    data = torch.randint(0, 256, (outputs, kind.row_bytes(depth)), dtype=torch.uint8)
    return kind.matrix(data, outputs, depth)


WAYS: dict[str, Callable[[Tensor], Linear]] = {way.__name__: way for way in (
    today, widened, *([halves] if has_fp16_gemm() else []), *([pairs] if has_bf16_gemm() else []),
    *([] if paths.obstacle("amx") else [by_tiles]), by_torch, own_int8, own_int4, fbgemm, onednn, int_mm, int8pack,
    int4pack, dyn_quant)}


def microseconds(layers: list[list[Linear]], inputs: list[Tensor], repeats: int, seconds: float = 0.0) -> float:
    """Returns the median over rounds of a layer's time: `repeats` rounds at least, and for at least `seconds`."""
    rounds: list[float] = []
    began = time.perf_counter()
    while len(rounds) <= repeats or time.perf_counter() < began + seconds:
        start = time.perf_counter()
        for layer in layers:
            for product, x in zip(layer, inputs, strict=True):
                product(x)
        rounds.append((time.perf_counter() - start) / len(layers) * 1e6)
    return statistics.median(rounds[1:])


def time_dense(way: str, weights: list[Tensor], layers: int, inputs: Inputs, repeats: int) -> list[Figure]:
    """Times an implementation that gets the weights in bfloat16, and prints its line."""
    products = [[WAYS[way](weight) for weight in weights] for _ in range(layers)]
    x = next(reversed(inputs.values()))[0]
    exact = x.double() @ weights[0].double().T
    error = float((products[0][0](x).double() - exact).norm() / exact.norm())
    figures, cells = list[Figure](), list[str]()
    for rows, tokens in inputs.items():
        try:
            each = microseconds(products, tokens, repeats if rows < FEW else 1)
        except RuntimeError as refusal:
            cells.append(str(refusal).splitlines()[0][:12])
        else:
            cells.append(f"{each:.0f}")
            figures.append({"weights": way, "rows": rows, "microseconds": each, "error": error})
    print(f"{way:24}" + "".join(f"{cell:>14}" for cell in cells) + f"{error:9.4f}", flush=True)
    return figures


def time_blocks(name: str, weights: list[Tensor], layers: int, inputs: Inputs, repeats: int) -> list[Figure]:
    """Times a type of GGUF, and prints its line: the share is of the mean of the read rates right before and after."""
    try:
        matrices = [blocks(name, weight) for weight in weights]
    except ValueError as refusal:
        print(f"{name:24}{refusal!s:>40}", flush=True)
        return []
    size = sum(map(KERNELS.linear_bytes, matrices))
    # Of copies: kernels pack one matrix once, and layers that share its panels would find them in the cache.
    products = [[KERNELS.linear(replace(matrix)) for matrix in matrices] for _ in range(layers)]
    microseconds(products, next(iter(inputs.values())), 1)  # which compiles
    figures, cells, before = list[Figure](), list[str](), read_rate(KERNELS, layers * size, READ_SECONDS)
    for rows, tokens in inputs.items():
        each = microseconds(products, tokens, repeats, ROUND_SECONDS)
        after = read_rate(KERNELS, layers * size, READ_SECONDS)
        share = size / each * 1e6 / ((before + after) / 2)
        figures.append({"weights": name, "rows": rows, "microseconds": each, "bytes": size, "share": share,
                        "bytes_per_second_before": before, "bytes_per_second_after": after})
        cells.append(f"{each:.0f} {share:5.0%}")
        before = after
    print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
    return figures


@torch.inference_mode()
def main() -> None:
    """Parse the command line, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512], help="rows of a step")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of which the median is taken, at least")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="whose layer's products are timed")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *BLOCK_TYPES, "blocks"], metavar="WAY",
                        help="implementations, and types of GGUF; blocks: all of those")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    asked = parser.parse_args()
    torch.manual_seed(SEED)
    shapes, layers = SHAPES[asked.shape]
    layers = asked.layers or layers
    weights = [torch.randn(size).bfloat16() for size in shapes]
    inputs = {rows: [torch.randn(rows, depth).bfloat16() for _, depth in shapes] for rows in asked.rows}
    ways = [*BLOCK_TYPES] if asked.ways == ["blocks"] else asked.ways or [*WAYS, *BLOCK_TYPES]
    print(f"{'microseconds a layer':24}" + "".join(f"{rows:>9} rows" for rows in asked.rows) + "    error", flush=True)
    figures = [figure for way in ways for figure in (time_dense if way in WAYS else time_blocks)(
        way, weights, layers, inputs, asked.repeats)]
    if asked.output:
        write_json(asked.output, {
            "environment": environment(), "threads": KERNELS.launcher.threads, "seed": SEED, "shape": asked.shape,
            "layers": layers, "figures": figures})

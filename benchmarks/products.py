"""Times the four products of a layer in bfloat16 and with quantized weights, by every implementation.

Caches are cold: each call reads another of a model's layers.  Prints microseconds for a layer's four products together,
and beside those of GGUF's types the share of the measured bandwidth at which their packed bytes were read.

    python benchmarks/products.py --rows 1 16 64 512
    python benchmarks/products.py --shape qwen3-0.6b --layers 8 --rows 1 2 4 8 --ways Q4_K Q6_K Q8_0
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.kernels.cpu import paths
from slotwise.kernels.cpu.kernels import CpuKernels
from slotwise.kernels.cpu.launcher import KernelLauncher
from slotwise.kernels.cpu.linear import tiled_linear
from slotwise.kernels.cpu.linear_bf16 import bf16_linear, has_bf16_gemm
from slotwise.kernels.cpu.linear_fp16 import fp16_linear, has_fp16_gemm
from slotwise.kernels.cpu.linear_int import int_linear
from slotwise.kernels.cpu.onednn import onednn_linear
from slotwise.kernels.interface import Linear
from slotwise.kernels.matrix import QuantisedMatrix
from slotwise.model.quantization.gguf_blocks import BLOCK_TYPES

SHAPES = {  # the products of a layer, [out, in], and the number of layers
    "smollm2-135m": (((960, 576), (576, 576), (3072, 576), (576, 1536)), 30),
    "qwen3-0.6b": (((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 28),
}
READ_BYTES = 1 << 28  # to measure the bandwidth
FEW = 512  # rows, from which on one round is enough
KERNELS = CpuKernels()
TEAM = KernelLauncher(torch.get_num_threads())


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
    return int_linear(weight, None, 8, paths.quantised(""), TEAM)


def own_int4(weight: Tensor) -> Linear:
    return int_linear(weight, None, 4, paths.quantised(""), TEAM)


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
        quantised, own = per_token(x)
        return (torch._int_mm(quantised, transposed) * own * scales).to(x.dtype)

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


def blocks(name: str, weight: Tensor) -> QuantisedMatrix:
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


def microseconds(layers: list[list[Linear]], inputs: list[Tensor], repeats: int) -> float:
    """Returns the median over rounds of a layer's time."""
    rounds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for layer in layers:
            for product, x in zip(layer, inputs, strict=True):
                product(x)
        rounds.append((time.perf_counter() - start) / len(layers) * 1e6)
    return statistics.median(rounds[1:])


def bandwidth() -> float:
    """Bytes a second that all threads read together."""
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


def cells_of(layers: list[list[Linear]], inputs: dict[int, list[Tensor]], repeats: int) -> list[str]:
    """Microseconds a layer for each number of rows, or what the implementation says about it."""
    cells = []
    for rows, x in inputs.items():
        try:
            cells.append(f"{microseconds(layers, x, repeats if rows < FEW else 1):.0f}")
        except RuntimeError as error:
            cells.append(str(error).splitlines()[0][:12])
    return cells


def print_dense(way: str, weights: list[Tensor], layers: int, inputs: dict[int, list[Tensor]], repeats: int) -> None:
    """A line of an implementation that gets the weights in bfloat16."""
    pack = WAYS[way]
    products = [[pack(weight) for weight in weights] for _ in range(layers)]
    cells = cells_of(products, inputs, repeats)
    x = next(reversed(inputs.values()))[0]
    exact = x.double() @ weights[0].double().T
    error = float((products[0][0](x).double() - exact).norm() / exact.norm())
    print(f"{way:24}" + "".join(f"{cell:>14}" for cell in cells) + f"{error:9.4f}", flush=True)


def print_blocks(
    name: str, weights: list[Tensor], layers: int, inputs: dict[int, list[Tensor]], repeats: int, rate: float
) -> None:
    """A line of a type of GGUF, with the share of the bandwidth `rate` at which its bytes were read."""
    try:
        matrices = [blocks(name, weight) for weight in weights]
    except ValueError as error:
        print(f"{name:24}{error!s:>40}", flush=True)
        return
    size = sum(map(KERNELS.linear_bytes, matrices))
    # Of copies: kernels pack one matrix once, and layers that share its panels would find them in the cache.
    products = [[KERNELS.linear(replace(matrix)) for matrix in matrices] for _ in range(layers)]
    times = cells_of(products, inputs, repeats)
    cells = [f"{each} {size / float(each) * 1e6 / rate:5.0%}" for each in times]
    print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--repeats", type=int, default=3, help="rounds of which the median is taken")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *BLOCK_TYPES], metavar="WAY")
    asked = parser.parse_args()
    torch.manual_seed(0)
    shapes, layers = SHAPES[asked.shape]
    layers = asked.layers or layers
    weights = [torch.randn(size).bfloat16() for size in shapes]
    inputs = {rows: [torch.randn(rows, depth).bfloat16() for _, depth in shapes] for rows in asked.rows}
    rate = bandwidth()
    print(f"bandwidth of {torch.get_num_threads()} threads: {rate / 1e9:.1f} GB/s")
    print(f"{'microseconds a layer':24}" + "".join(f"{rows:>9} rows" for rows in asked.rows) + "    error", flush=True)
    for way in asked.ways or [*WAYS, *BLOCK_TYPES]:
        if way in WAYS:
            print_dense(way, weights, layers, inputs, asked.repeats)
        else:
            print_blocks(way, weights, layers, inputs, asked.repeats, rate)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

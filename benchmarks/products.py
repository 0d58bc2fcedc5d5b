"""Times the four products of a SmolLM2-135M layer in bfloat16 and with quantized weights, by every implementation.

Caches are cold: each call reads another of 30 layers' weights.  Prints microseconds for a layer's four products
together.

    python benchmarks/products.py --rows 1 16 64 512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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

HIDDEN, INTERMEDIATE = 576, 1536
PRODUCTS = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))  # [out, in]
LAYERS = 30
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


WAYS: tuple[Callable[[Tensor], Linear], ...] = (
    today, widened, *([halves] if has_fp16_gemm() else []), *([pairs] if has_bf16_gemm() else []),
    *([] if paths.obstacle("amx") else [by_tiles]), by_torch, own_int8, own_int4, fbgemm, onednn, int_mm, int8pack,
    int4pack, dyn_quant)


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


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--repeats", type=int, default=3, help="rounds of which the median is taken")
    parser.add_argument("--ways", nargs="+", choices=[way.__name__ for way in WAYS], metavar="WAY")
    asked = parser.parse_args()
    torch.manual_seed(0)
    weights = [torch.randn(size).bfloat16() for size in PRODUCTS]
    inputs = {rows: [torch.randn(rows, depth).bfloat16() for _, depth in PRODUCTS] for rows in asked.rows}
    print(f"{'microseconds a layer':24}" + "".join(f"{rows:>9} rows" for rows in asked.rows) + "    error", flush=True)
    for way in WAYS:
        if asked.ways and way.__name__ not in asked.ways:
            continue
        layers = [[way(weight) for weight in weights] for _ in range(LAYERS)]
        cells = []
        for rows in asked.rows:
            try:
                cells.append(f"{microseconds(layers, inputs[rows], asked.repeats if rows < 512 else 1):14.0f}")
            except RuntimeError as error:
                cells.append(f"{str(error).splitlines()[0][:12]:>14}")
        x = inputs[asked.rows[-1]][0]
        exact = x.double() @ weights[0].double().T
        error = float((layers[0][0](x).double() - exact).norm() / exact.norm())
        print(f"{way.__name__:24}" + "".join(cells) + f"{error:9.4f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

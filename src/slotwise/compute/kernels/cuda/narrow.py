"""Products of 8-bit tokens with 8-bit weights (W8A8): integers, or floats where the device has tensor cores for them.

The weights of an output share one scale.  The numbers of a token get one when they are quantized, so a product of codes
is scaled once, after its sum (LLM.int8, Dettmers et al., 2022; Micikevicius et al., 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.configs import narrow_tile
from slotwise.compute.kernels.cuda.jit import jit_varying
from slotwise.compute.kernels.cuda.packed import SplitProduct, part_of
from slotwise.compute.kernels.interface import FP8_LARGEST
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix

INT8_LARGEST = 127.0
# The first compute capability with products of 8-bit floats.
FP8_SINCE = 89
# Rows of codes begin at multiples of so many bytes.
DEPTH_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class NarrowMatrix:
    """An 8-bit matrix on a device."""

    codes: Tensor  # [outputs, depth rounded up] int8 or float8_e4m3fn; zeros behind
    scales: Tensor  # [outputs] float32
    depth: int


def is_narrow(kind: Format, capability: int) -> bool:
    """Whether products with a format's matrices quantize their tokens."""
    if kind.bits != 8 or kind.group or kind.has_minimums:
        return False
    return capability >= FP8_SINCE if kind.are_floats else not kind.levels and kind.zero == 128


def narrow_bytes(outputs: int, depth: int) -> int:
    """Bytes of a packed matrix."""
    return outputs * (_rounded(depth) + torch.float32.itemsize)


def pack(matrix: QuantizedMatrix, device: torch.device) -> NarrowMatrix:
    """Read a matrix whose format is narrow, some outputs at a time."""
    floats = matrix.format.are_floats
    codes = torch.zeros(matrix.outputs, _rounded(matrix.depth), dtype=torch.uint8, device=device)
    scales, step = torch.empty(matrix.outputs, device=device), max(1, (1 << 24) // matrix.depth)
    for first in range(0, matrix.outputs, step):
        rows = matrix.read(first, min(first + step, matrix.outputs))
        read = rows.codes.to(device)
        codes[first : first + step, : matrix.depth] = read if floats else read ^ 0x80  # minus 128, as int8
        scales[first : first + step] = rows.scales.floats()[:, 0].to(device)
    return NarrowMatrix(codes.view(torch.float8_e4m3fn if floats else torch.int8), scales, matrix.depth)


def _rounded(depth: int) -> int:
    return -(-depth // DEPTH_STEP) * DEPTH_STEP


def multiply(x: Tensor, matrix: NarrowMatrix, bias: Tensor | None) -> Tensor:
    """`x [tokens, depth] @ matrix.T + bias`: `[tokens, outputs]` of x's type."""
    tokens, (outputs, stride) = len(x), matrix.codes.shape
    out = x.new_empty(tokens, outputs)
    if not tokens:
        return out
    codes, scales = quantized_rows(x, matrix.codes.dtype, stride)
    tile = narrow_tile(tokens)
    grid = (triton.cdiv(tokens, tile.block_m), triton.cdiv(outputs, tile.block_n))
    parts = SplitProduct.of(out, grid, stride, tile.block_k)
    _multiply_narrow[(*grid, parts.number)](
        parts.sums, codes, matrix.codes, scales, matrix.scales, x if bias is None else bias, tokens, OUTPUTS=outputs,
        STRIDE=stride, BIAS=bias is not None and parts.number == 1, INTEGERS=codes.dtype == torch.int8,
        PART=parts.depth, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages)
    return parts.added(out, bias)


def quantized_rows(x: Tensor, kind: torch.dtype, stride: int) -> tuple[Tensor, Tensor]:
    """`x [tokens, depth]` as codes `[tokens, stride]` of `kind`, zeros behind, and scales `[tokens]` float32."""
    x = x.contiguous()
    tokens, depth = x.shape
    codes, scales = x.new_empty(tokens, stride, dtype=kind), x.new_empty(tokens, dtype=torch.float32)
    block, integers = triton.next_power_of_2(stride), kind == torch.int8
    _quantize_rows[(tokens,)](
        codes, scales, x, DEPTH=depth, STRIDE=stride, LARGEST=INT8_LARGEST if integers else FP8_LARGEST,
        INTEGERS=integers, BLOCK=block, num_warps=min(max(block // 512, 1), 16))
    return codes, scales


@jit_varying()
def _quantize_rows(
    codes: tl.tensor, scales: tl.tensor, x: tl.tensor, DEPTH: tl.constexpr, STRIDE: tl.constexpr,
    LARGEST: tl.constexpr, INTEGERS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Quantize one token.  A token that holds NaN gets the scale NaN, so its products are NaN, too."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    numbers = tl.load(x + token * DEPTH + column, column < DEPTH, 0.0).to(tl.float32)
    unsound = tl.max((numbers != numbers).to(tl.int32), 0)
    largest = tl.max(tl.where(numbers != numbers, 0.0, tl.abs(numbers)), 0)
    steps = numbers * (LARGEST / tl.maximum(largest, 1e-30))
    steps = tl.where(steps != steps, 0.0, tl.clamp(steps, -LARGEST, LARGEST))
    if INTEGERS:
        steps = tl.floor(steps + 0.5)
    tl.store(codes + token * STRIDE + column, steps.to(codes.dtype.element_ty), column < STRIDE)
    tl.store(scales + token, tl.where(unsound > 0, float("nan"), largest / LARGEST))


@jit_varying("tokens")
def _multiply_narrow(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, x_scales: tl.tensor, scales: tl.tensor, bias: tl.tensor,
    tokens: tl.tensor, OUTPUTS: tl.constexpr, STRIDE: tl.constexpr, BIAS: tl.constexpr, INTEGERS: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:
    """One tile of tokens and outputs, of one part of PART inputs."""
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    present, there, place = token < tokens, output < OUTPUTS, tl.arange(0, BLOCK_K)
    kind: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    total = tl.full([BLOCK_M, BLOCK_N], 0, kind)
    begin, end = part_of(STRIDE, PART)
    for first in range(begin, end, BLOCK_K):
        column = first + place
        inside = column < STRIDE
        left = tl.load(x + token[:, None] * STRIDE + column[None, :], present[:, None] & inside[None, :], 0.0)
        right = tl.load(weight + output[None, :] * STRIDE + column[:, None], there[None, :] & inside[:, None], 0.0)
        total = tl.dot(left, right, total, out_dtype=kind)
    result = total.to(tl.float32) * tl.load(x_scales + token, present, 0.0)[:, None]
    result *= tl.load(scales + output, there, 0.0)[None, :]
    if BIAS:
        result += tl.load(bias + output, there, 0.0).to(tl.float32)[None, :]
    inside = present[:, None] & there[None, :]
    if PART < STRIDE:
        token += tl.program_id(2).to(tl.int64) * tokens
    tl.store(out + token[:, None] * OUTPUTS + output[None, :], result.to(out.dtype.element_ty), inside)

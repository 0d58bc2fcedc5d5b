"""Norms and activations, token by token, in float32, rounded once where a result is stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.jit import jit
from slotwise.compute.kernels.interface import Activation

# Elements that one program computes.
GATE_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension of `x [tokens, hidden]`."""
    x = x.contiguous()
    tokens, size = x.shape
    out = torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(size)
        _rms_norm[(tokens,)](out, x, weight, eps, size, block, offset, num_warps=_warps(block))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`residual += x` in place, then RMSNorm of the sum as stored: `[tokens, hidden]`.  `residual` is contiguous."""
    x = x.contiguous()
    tokens, size = x.shape
    out = torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(tokens,)](out, x, residual, weight, eps, size, block, offset, num_warps=_warps(block))
    return out


def activated(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
    gate_up = gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    if tokens:
        grid = (tokens, triton.cdiv(size, GATE_BLOCK))
        _activated[grid](out, gate_up, size, GATE_BLOCK, activation == "gelu_tanh", num_warps=4)
    return out


def _warps(block: int) -> int:
    """About 16 elements per thread."""
    return min(max(block // 512, 1), 16)


@jit
def _rms_norm(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    values = tl.load(x + at, inside, 0.0).to(tl.float32)
    _store_normed(out + at, values, weight + columns, inside, eps, SIZE, OFFSET)


@jit
def _add_rms_norm(
    out: tl.tensor, x: tl.tensor, residual: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(residual + at, inside, 0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual + at, stored, inside)
    _store_normed(out + at, stored.to(tl.float32), weight + columns, inside, eps, SIZE, OFFSET)


@jit
def _store_normed(
    out: tl.tensor, values: tl.tensor, weight: tl.tensor, inside: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """`values [BLOCK]` float32, zero outside, normed and stored at pointers `out [BLOCK]`."""
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = values * factor * (tl.load(weight, inside, 0.0).to(tl.float32) + OFFSET)
    tl.store(out, normed.to(out.dtype.element_ty), inside)


@jit
def _activated(out: tl.tensor, gate_up: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + token * 2 * SIZE + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + columns, inside, 0.0).to(tl.float32)
    power = gate * (1.5957691216057308 + 0.07135481282952456 * gate * gate) if GELU else gate  # 2 * sqrt(2 / pi) ...
    result = gate / (1.0 + tl.exp(-power)) * up
    tl.store(out + token * SIZE + columns, result.to(out.dtype.element_ty), inside)

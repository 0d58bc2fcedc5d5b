"""Norms and activations, token by token, in float32, rounded once where a result is stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.jit import jit
from slotwise.compute.kernels.interface import Activation, LayerNormWeights

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


def layer_norm(x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
    """LayerNorm (Ba et al., 2016) of `x [tokens, hidden]`, or of `residual += x`, in place, as stored."""
    x = x.contiguous()
    tokens, size = x.shape
    out = torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(size)
        _layer_norm[(tokens,)](
            out, x, x if residual is None else residual, x if norm.weight is None else norm.weight,
            x if norm.bias is None else norm.bias, norm.eps, size, block, norm.offset, residual is not None,
            norm.weight is not None, norm.bias is not None, num_warps=_warps(block))
    return out


def activated(x: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
    """`activation(x)`, or `activation(gate) * up` for `[gate, up] = x [tokens, 2 * intermediate]`."""
    x = x.contiguous()
    tokens, size = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    out = x.new_empty(tokens, size)
    if tokens:
        grid = (tokens, triton.cdiv(size, GATE_BLOCK))
        _activated[grid](out, x, size, GATE_BLOCK, activation, is_gated, num_warps=4)
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
def _layer_norm(
    out: tl.tensor, x: tl.tensor, residual: tl.tensor, weight: tl.tensor, bias: tl.tensor, eps: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    values = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADDS:
        stored = (values + tl.load(residual + at, inside, 0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, stored, inside)
        values = stored.to(tl.float32)
    off = tl.where(inside, values - tl.sum(values, 0) / SIZE, 0.0)
    normed = off * tl.rsqrt(tl.sum(off * off, 0) / SIZE + eps)
    if HAS_WEIGHT:
        normed *= tl.load(weight + columns, inside, 0.0).to(tl.float32) + OFFSET
    if HAS_BIAS:
        normed += tl.load(bias + columns, inside, 0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), inside)


@jit
def _activated(
    out: tl.tensor, x: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = token * (2 * SIZE if GATED else SIZE)
    gate = tl.load(x + start + columns, inside, 0.0).to(tl.float32)
    if ACTIVATION == "relu":
        result = tl.maximum(gate, 0.0)
    elif ACTIVATION == "relu2":
        result = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif ACTIVATION == "gelu":
        result = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        power = gate
        if ACTIVATION == "gelu_tanh":  # 2 * sqrt(2 / pi) ...
            power = gate * (1.5957691216057308 + 0.07135481282952456 * gate * gate)
        elif ACTIVATION == "quick_gelu":
            power = 1.702 * gate
        result = gate / (1.0 + tl.exp(-power))
    if GATED:
        result *= tl.load(x + start + SIZE + columns, inside, 0.0).to(tl.float32)
    tl.store(out + token * SIZE + columns, result.to(out.dtype.element_ty), inside)

"""Mixtures of experts: products of the tokens that chose an expert with its weights, all experts in one launch.

A token and one of its experts are a *pair*, `token * top_k + rank`.  Pairs are put in the order of their experts, and
the rows of an expert are cut into tiles (MegaBlocks, Gale et al., 2023), numbered as those of attention are: expert e
owns the tiles from `starts[e] // BLOCK_M + e` on (`prefill.py`).

    route        a token      its experts and their shares
    arrange      an expert    where its pairs begin, and which they are
    multiply     a tile       gates and what they gate, by expert ─► activation ─► down, back in the order of tokens
    combine      a token      the sum of its experts' results, by their shares

The host never learns how many tokens chose an expert, so nothing waits for the device, and all of it can be captured.
The weights of experts that no token chose are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.kernels.cuda.configs import experts_tile
from slotwise.kernels.cuda.jit import jit, jit_varying
from slotwise.kernels.cuda.prefill import find_row, first_tile, num_tiles
from slotwise.kernels.cuda.tile import OPERANDS
from slotwise.kernels.interface import ExpertWeights, Linear, Routing

COLUMNS = 512  # of a token's result that a program adds
_PAIRS = tl.constexpr(1024)  # read together
_NOWHERE = tl.constexpr(0x7FFFFFFF)


class Stacked(NamedTuple):
    """The weights of all experts."""

    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]
    gate_up_bias: Tensor | None  # [experts, 2 * intermediate]
    down_bias: Tensor | None


class Arranged(NamedTuple):
    """Pairs in the order of their experts."""

    pairs: Tensor  # [tokens * top_k] int32
    starts: Tensor  # [experts + 1] int32, where each expert's begin


def stack(weights: Iterable[ExpertWeights], count: int, device: torch.device) -> Stacked:
    """Copy the weights of `count` experts, which are tensors, one after another."""
    each: Iterator[tuple[Tensor | None, ...]] = map(_tensors, weights)
    first = next(each)
    places = [None if one is None else torch.empty(count, *one.shape, dtype=one.dtype, device=device) for one in first]
    for expert, of_one in enumerate(chain([first], each)):
        for place, weight in zip(places, of_one, strict=True):
            if place is not None and weight is not None:
                place[expert].copy_(weight)
    gate_up, down, gate_up_bias, down_bias = places
    assert gate_up is not None and down is not None
    return Stacked(gate_up, down, gate_up_bias, down_bias)


def _tensors(weights: ExpertWeights) -> tuple[Tensor | None, ...]:
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor), "packed experts are refused"
    return weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias


def mixture(x: Tensor, logits: Tensor, weights: Stacked, routing: Routing, ends: Tensor, activate: Linear) -> Tensor:
    """`[tokens, hidden] -> [tokens, hidden]`; `logits [tokens, experts]`; adds to `ends [experts]` where each ends."""
    x = x.contiguous()
    if not len(x):
        return torch.empty_like(x)
    chosen, shares = route(logits.contiguous(), routing)
    arranged = in_order(chosen, routing.num_experts)
    ends += arranged.starts[1:]
    out, held = None, routing.held
    if held is not None:  # pairs of others come behind, and give zeros
        is_here = (chosen >= held.start) & (chosen < held.stop)
        arranged = in_order(torch.where(is_here, chosen - held.start, len(held)).int(), len(held) + 1)
        out = x.new_zeros(len(chosen), x.shape[1])
    hidden = activate(multiply(x, weights.gate_up, weights.gate_up_bias, arranged, routing.top_k, is_first=True))
    results = multiply(hidden, weights.down, weights.down_bias, arranged, routing.top_k, is_first=False, out=out)
    out, (tokens, size) = torch.empty_like(x), x.shape
    _combine[(tokens, triton.cdiv(size, COLUMNS))](
        out, results, shares, SIZE=size, TOP_K=routing.top_k, BLOCK=COLUMNS, num_warps=4)
    return out


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of every token, and their shares: `[tokens * top_k]` int32 and float32.

    Of equal logits the first comes first.
    """
    tokens, experts = logits.shape
    chosen = torch.empty(tokens * routing.top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens * routing.top_k, device=logits.device)
    _route[(tokens,)](
        chosen, shares, logits, EXPERTS=experts, TOP_K=routing.top_k, NORMALISED=routing.is_normalised,
        BLOCK=triton.next_power_of_2(experts), num_warps=1)
    return chosen, shares


def in_order(chosen: Tensor, experts: int) -> Arranged:
    """Pairs in the order of their experts, and of one expert as they are; `chosen [pairs]` int32."""
    order = torch.empty_like(chosen)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    _arrange[(experts,)](order, starts, chosen, len(chosen), num_warps=4)
    return Arranged(order, starts)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, arranged: Arranged, top_k: int, *, is_first: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The first product of pairs reads tokens and writes in the order of experts; the second goes back to pairs.

    Args:
        weight: `[experts, outputs, depth]`; pairs of further experts are left out.
        out: `[pairs, outputs]`, where there is a place for the result.
    """
    pairs, (experts, outputs, depth) = len(arranged.pairs), weight.shape
    out = x.new_empty(pairs, outputs) if out is None else out
    tile = experts_tile(pairs, experts, x.dtype)
    grid = (num_tiles(pairs, experts, 1, tile.block_m), triton.cdiv(outputs, tile.block_n))
    _multiply_experts[grid](
        out, x, weight, x if bias is None else bias, arranged.pairs, arranged.starts, experts, OUTPUTS=outputs,
        DEPTH=depth, TOP_K=top_k, FIRST=is_first, BIAS=bias is not None, OPERAND=OPERANDS[x.dtype],
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages)
    return out


@jit
def _route(
    chosen: tl.tensor, shares: tl.tensor, logits: tl.tensor, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """A token's TOP_K largest logits, and the softmax of them or of all.  NaN among them makes all shares NaN."""
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = expert < EXPERTS
    given = tl.load(logits + token * EXPERTS + expert, there, float("-inf")).to(tl.float32)
    scores = tl.where(given != given, float("-inf"), given)
    largest = tl.max(scores, 0)
    weights = tl.where(there, tl.exp(given - largest), 0.0)
    left = there
    total = tl.sum(weights, 0)
    if NORMALISED:
        taken = there & (expert < 0)
        for _ in tl.static_range(TOP_K):
            best = _best(scores, expert, there & (taken == 0))
            taken = taken | (expert == best)
        total = tl.sum(tl.where(taken | (given != given), weights, 0.0), 0)
    for rank in tl.static_range(TOP_K):
        best = _best(scores, expert, left)
        left = left & (expert != best)
        share = tl.sum(tl.where(expert == best, weights, 0.0), 0) / total
        tl.store(chosen + token * TOP_K + rank, best)
        tl.store(shares + token * TOP_K + rank, share)


@jit
def _best(scores: tl.tensor, expert: tl.tensor, left: tl.tensor) -> tl.tensor:
    """The first expert with the largest score of those that are left."""
    largest = tl.max(tl.where(left, scores, float("-inf")), 0)
    return tl.min(tl.where(left & (scores == largest), expert, _NOWHERE), 0)


@jit_varying("pairs")
def _arrange(order: tl.tensor, starts: tl.tensor, chosen: tl.tensor, pairs: tl.tensor) -> None:
    """The pairs of one expert, in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    before = tl.full([_PAIRS], 0, tl.int32)
    for first in range(0, pairs, _PAIRS):
        pair = first + tl.arange(0, _PAIRS)
        before += (tl.load(chosen + pair, pair < pairs, _NOWHERE) < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + expert, place)
    for first in range(0, pairs, _PAIRS):
        pair = first + tl.arange(0, _PAIRS)
        mine = (tl.load(chosen + pair, pair < pairs, _NOWHERE) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, pair, mine > 0)
        place += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, pairs)


@jit_varying("num_experts")
def _multiply_experts(
    out: tl.tensor, x: tl.tensor, weight: tl.tensor, bias: tl.tensor, pairs: tl.tensor, starts: tl.tensor,
    num_experts: tl.tensor, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, TOP_K: tl.constexpr, FIRST: tl.constexpr,
    BIAS: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:
    """A tile of one expert's pairs and outputs."""
    tile = tl.program_id(0)
    expert = find_row(starts, tile, num_experts, 1, BLOCK_M)
    begin = tl.load(starts + expert) + (tile - first_tile(starts, expert, 1, BLOCK_M)) * BLOCK_M
    end = tl.load(starts + expert + 1)
    if begin >= end:
        return
    place = begin + tl.arange(0, BLOCK_M)
    present = place < end
    pair = tl.load(pairs + place, present, 0)
    row = (pair // TOP_K if FIRST else place).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, column = output < OUTPUTS, tl.arange(0, BLOCK_K)
    matrix = weight + expert.to(tl.int64) * OUTPUTS * DEPTH
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        inside = first + column < DEPTH
        left = tl.load(x + row[:, None] * DEPTH + (first + column)[None, :], present[:, None] & inside[None, :], 0.0)
        right = tl.load(matrix + output[None, :] * DEPTH + (first + column)[:, None],
                        there[None, :] & inside[:, None], 0.0)
        total = tl.dot(left.to(OPERAND), right.to(OPERAND), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + expert * OUTPUTS + output, there, 0.0).to(tl.float32)[None, :]
    to = (place if FIRST else pair).to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), present[:, None] & there[None, :])


@jit
def _combine(
    out: tl.tensor, results: tl.tensor, shares: tl.tensor, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one token's result."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.full([BLOCK], 0.0, tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        total += tl.load(shares + pair) * tl.load(results + pair * SIZE + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), inside)

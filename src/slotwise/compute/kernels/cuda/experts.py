"""Mixtures of experts: products of the tokens that chose an expert with its weights, all experts in one launch.

A token and one of its experts are a *pair*, `token * top_k + rank`.  Pairs are put in the order of their experts, and
the rows of an expert are cut into tiles (MegaBlocks, Gale et al., 2023), numbered like the tiles of attention: expert e
owns the tiles from `starts[e] // BLOCK_M + e` on (`attention.py`).

    route        a token      its experts and their shares
    arrange      an expert    where its pairs begin, and which they are
    multiply     a tile       gates and up, by expert ─► activation ─► down, back in the order of tokens
    combine      a token      the sum of its experts' results, by their shares

The host never learns how many tokens chose an expert, so nothing waits for the device, and all of it can be captured.
The weights of experts without tokens are not read.  Quantized matrices of a layer's experts lie one behind the other
along their outputs, as one packed matrix; their codes become numbers in registers, as in `packed.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.attention import find_row, first_tile, num_tiles
from slotwise.compute.kernels.cuda.configs import expert_codes_tile, experts_tile
from slotwise.compute.kernels.cuda.jit import OPERANDS, jit, jit_varying
from slotwise.compute.kernels.cuda.packed import PackedMatrix, add_products, constants, factors, pack
from slotwise.compute.kernels.interface import ExpertGroups, ExpertWeights, Linear, Routing
from slotwise.compute.kernels.matrix import Factors, StackedMatrix, Weight


class ExpertOrder(NamedTuple):
    """Pairs in the order of their experts: `pairs [tokens * top_k]` and `starts [experts + 1]`, int32.

    The pairs of expert e are `pairs[starts[e] : starts[e + 1]]`.
    """

    pairs: Tensor
    starts: Tensor


@jit
def rows_of_tile(
    pairs: tl.tensor, starts: tl.tensor, num_experts: tl.tensor, TOP_K: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The tile's expert, whether the tile is empty, which rows exist, the rows that are read, and those written.

    The first product reads tokens and writes in the order of experts; the second goes back to pairs.
    """
    tile = tl.program_id(0)
    expert = find_row(starts, tile, num_experts, 1, BLOCK_M)
    begin = tl.load(starts + expert) + (tile - first_tile(starts, expert, 1, BLOCK_M)) * BLOCK_M
    end = tl.load(starts + expert + 1)
    place = begin + tl.arange(0, BLOCK_M)
    present = place < end
    pair = tl.load(pairs + place, present, 0)
    row = pair // TOP_K if FIRST else place
    to = place if FIRST else pair
    return expert.to(tl.int64), begin >= end, present, row.to(tl.int64), to.to(tl.int64)



@dataclass(frozen=True, slots=True, eq=False)
class ExpertCodes:
    """A matrix of each expert, in one format.

    `inputs [experts, depth]` int64 is the input at each place, where a file orders them.
    """

    together: PackedMatrix
    experts: int
    inputs: Tensor | None

    @property
    def outputs(self) -> int:
        """Outputs of each expert."""
        return self.together.outputs // self.experts


def tensors_of(matrix: PackedMatrix) -> list[Tensor | None]:
    """The tensors that differ between experts; `together` takes them stacked."""
    minimums: tuple[Tensor | None, ...] = (None, None) if matrix.minimums is None else matrix.minimums
    return [matrix.codes, *matrix.scales, *minimums, matrix.inputs]


def together(of_one: PackedMatrix, stacked: Sequence[Tensor | None]) -> ExpertCodes:
    """Matrices like `of_one`, from their tensors `[experts, ...]`."""
    codes, scales, scale_units, minimums, minimum_units = (
        None if each is None else each.flatten(0, 1) for each in stacked[:-1])
    assert codes is not None and scales is not None
    experts = len(codes) // of_one.outputs
    whole = replace(
        of_one, outputs=len(codes), codes=codes, scales=Factors(scales, scale_units),
        minimums=None if minimums is None else Factors(minimums, minimum_units), order=None, inputs=None)
    return ExpertCodes(whole, experts, stacked[-1])


def multiply_codes(
    out: Tensor, x: Tensor, weight: ExpertCodes, bias: Tensor | None, arranged: ExpertOrder, top_k: int, *,
    is_first: bool,
) -> None:
    """`multiply` with packed weights, to `out [pairs, outputs]`; `bias [experts, outputs]`."""
    pairs, matrix = len(arranged.pairs), weight.together
    tile = expert_codes_tile(pairs, weight.experts, x.dtype)
    grid = (num_tiles(pairs, weight.experts, 1, tile.block_m), triton.cdiv(weight.outputs, tile.block_n))
    _multiply_expert_codes[grid](
        out, x, matrix.codes, *factors(matrix), matrix.codes if weight.inputs is None else weight.inputs,
        x if bias is None else bias, arranged.pairs, arranged.starts, weight.experts,
        **(constants(matrix) | {"OUTPUTS": weight.outputs}), ORDERED=weight.inputs is not None, TOP_K=top_k,
        FIRST=is_first, BIAS=bias is not None, OPERAND=OPERANDS[x.dtype], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages)


@jit_varying("num_experts")
def _multiply_expert_codes(
    out: tl.tensor, x: tl.tensor, codes: tl.tensor, scales: tl.tensor, scale_units: tl.tensor, minimums: tl.tensor,
    minimum_units: tl.tensor, levels: tl.tensor, inputs: tl.tensor, bias: tl.tensor, pairs: tl.tensor,
    starts: tl.tensor, num_experts: tl.tensor, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PER_UNIT: tl.constexpr, ZERO: tl.constexpr, NIBBLES: tl.constexpr,
    MINIMUMS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, ORDERED: tl.constexpr, TOP_K: tl.constexpr,
    FIRST: tl.constexpr, BIAS: tl.constexpr, OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """A tile of one expert's pairs and outputs."""
    expert, is_empty, present, row, to = rows_of_tile(pairs, starts, num_experts, TOP_K, FIRST, BLOCK_M)
    if is_empty:
        return
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    there, matrix = output < OUTPUTS, expert * OUTPUTS
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    total = add_products(
        total, x, row, present, codes, scales, scale_units, minimums, minimum_units, levels, matrix + output, there,
        inputs + expert * DEPTH, 0, ROW_BYTES, DEPTH, ROW_BYTES, GROUPS, GROUP, PER_UNIT, ZERO, NIBBLES, MINIMUMS,
        LEVELS, OPERAND, CHUNK, ORDERED)
    if BIAS:
        total += tl.load(bias + matrix + output, there, 0.0).to(tl.float32)[None, :]
    tl.store(out + to[:, None] * OUTPUTS + output[None, :], total.to(out.dtype.element_ty),
             present[:, None] & there[None, :])


# Columns of a token's result that a program adds.
COLUMNS = 512
# Pairs that are read together.
_PAIRS = tl.constexpr(1024)
_NOWHERE = tl.constexpr(0x7FFFFFFF)


ExpertProduct = Tensor | ExpertCodes
"""Weights `[experts, outputs, depth]`, or packed ones."""


class StackedExperts(NamedTuple):
    """The weights of all experts; a product's weights may be of several formats, concatenated along the outputs."""

    # Together 2 * intermediate outputs.
    gate_up: Sequence[ExpertProduct]
    down: Sequence[ExpertProduct]
    # [experts, 2 * intermediate] and [experts, hidden].
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def stack(weights: Iterable[ExpertWeights], count: int, device: torch.device) -> StackedExperts:
    """Copy the weights of `count` experts, one after another."""
    each = (_packed(one, device) for one in weights)
    first = next(each)
    places = [None if one is None else torch.empty(count, *one.shape, dtype=one.dtype, device=device)
              for one in _tensors(first)]
    for expert, of_one in enumerate(chain([first], each)):
        for place, tensor in zip(places, _tensors(of_one), strict=True):
            if place is not None and tensor is not None:
                place[expert].copy_(tensor)
    left = iter(places)
    gate_up, down = ([_stacked(part, left) for part in parts] for parts in (first.gate_up, first.down))
    return StackedExperts(gate_up, down, next(left), next(left))


class _PackedExpert(NamedTuple):
    """The weights of one expert."""

    gate_up: Sequence[Tensor | PackedMatrix]
    down: Sequence[Tensor | PackedMatrix]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _packed(weights: ExpertWeights, device: torch.device) -> _PackedExpert:
    def parts(weight: Weight) -> list[Tensor | PackedMatrix]:
        if isinstance(weight, Tensor):
            return [weight]
        return [pack(part, device) for part in (weight.parts if isinstance(weight, StackedMatrix) else [weight])]

    return _PackedExpert(parts(weights.gate_up), parts(weights.down), weights.gate_up_bias, weights.down_bias)


def _tensors(of_one: _PackedExpert) -> list[Tensor | None]:
    """All tensors of an expert, in one order."""
    products = ([part] if isinstance(part, Tensor) else tensors_of(part)
                for part in (*of_one.gate_up, *of_one.down))
    return [*chain.from_iterable(products), of_one.gate_up_bias, of_one.down_bias]


def _stacked(part: Tensor | PackedMatrix, left: Iterator[Tensor | None]) -> ExpertProduct:
    """The product of all experts like `part`, the first expert's; takes its tensors from those that are left."""
    if isinstance(part, PackedMatrix):
        return together(part, list(islice(left, len(tensors_of(part)))))
    stacked = next(left)
    assert stacked is not None
    return stacked


def mixture(
    x: Tensor, logits: Tensor, weights: StackedExperts, routing: Routing, ends: Tensor, activate: Linear,
) -> Tensor:
    """`[tokens, hidden] -> [tokens, hidden]`; `logits [tokens, experts]`.

    Adds the end of each expert's pairs to `ends [experts]`.
    """
    x = x.contiguous()
    out, (tokens, size) = torch.empty_like(x), x.shape
    if not tokens:
        return out
    chosen, shares = route(logits.contiguous(), routing)
    arranged = in_order(chosen, routing.num_experts)
    ends += arranged.starts[1:]
    held, top_k = routing.held, routing.top_k
    if held is not None:  # pairs of experts of other ranks come last, and give zeros
        is_here = (chosen >= held.start) & (chosen < held.stop)
        arranged = in_order(torch.where(is_here, chosen - held.start, len(held)).int(), len(held) + 1)
    reads = top_k
    if routing.scales_inputs:  # a row of each pair, and results as they are
        x, reads = (x.repeat_interleave(top_k, 0) * shares[:, None]).to(x.dtype), 1
        shares = torch.ones_like(shares)
    inner = _side_by_side(x, weights.gate_up, weights.gate_up_bias, arranged, reads, is_first=True)
    results = _side_by_side(activate(inner), weights.down, weights.down_bias, arranged, top_k, is_first=False,
                            has_others=held is not None)
    _combine[(tokens, triton.cdiv(size, COLUMNS))](
        out, results, shares, SIZE=size, TOP_K=routing.top_k, BLOCK=COLUMNS, num_warps=4)
    return out


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of every token, and their shares: `[tokens * top_k]` int32 and float32.

    Equal logits keep their order.
    """
    tokens, experts = logits.shape
    chosen = torch.empty(tokens * routing.top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens * routing.top_k, device=logits.device)
    groups = routing.groups or ExpertGroups(0, 0, 0)
    _route[(tokens,)](
        chosen, shares, logits, shares if routing.correction is None else routing.correction, EXPERTS=experts,
        TOP_K=routing.top_k, NORMALIZED=routing.is_normalized, SCORING=routing.scoring,
        BY_SCORE=routing.chooses_by_scores, CORRECTED=routing.correction is not None, GROUPS=groups.number,
        KEPT=groups.kept, NUM_BEST=groups.num_best, SCALE=routing.scale, LEAST=routing.least_sum,
        JITTER=routing.jitter, BLOCK=triton.next_power_of_2(experts), num_warps=1)
    return chosen, shares


def in_order(chosen: Tensor, experts: int) -> ExpertOrder:
    """Pairs sorted by expert, stably; `chosen [pairs]` int32."""
    order = torch.empty_like(chosen)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    _arrange[(experts,)](order, starts, chosen, len(chosen), num_warps=4)
    return ExpertOrder(order, starts)


def _side_by_side(
    x: Tensor, parts: Sequence[ExpertProduct], bias: Tensor | None, arranged: ExpertOrder, top_k: int, *,
    is_first: bool, has_others: bool = False,
) -> Tensor:
    """The product with parts along the outputs; zero for pairs of experts of other ranks, if `has_others`."""
    sizes = [part.shape[1] if isinstance(part, Tensor) else part.outputs for part in parts]
    biases = [None] * len(parts) if bias is None else [own.contiguous() for own in bias.split(sizes, dim=1)]
    places = [x.new_zeros(len(arranged.pairs), size) if has_others else None for size in sizes]
    found = [multiply(x, part, own, arranged, top_k, is_first=is_first, out=place)
             for part, own, place in zip(parts, biases, places, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def multiply(
    x: Tensor, weight: ExpertProduct, bias: Tensor | None, arranged: ExpertOrder, top_k: int, *, is_first: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The first product of pairs reads tokens and writes in the order of experts; the second goes back to pairs.

    Pairs of experts beyond those of `weight` are left out.  The result is stored to `out [pairs, outputs]`, if given.
    """
    pairs, outputs = len(arranged.pairs), weight.shape[1] if isinstance(weight, Tensor) else weight.outputs
    out = x.new_empty(pairs, outputs) if out is None else out
    if isinstance(weight, ExpertCodes):
        multiply_codes(out, x, weight, bias, arranged, top_k, is_first=is_first)
        return out
    experts, _, depth = weight.shape
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
    chosen: tl.tensor, shares: tl.tensor, logits: tl.tensor, correction: tl.tensor, EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, SCORING: tl.constexpr, BY_SCORE: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, NUM_BEST: tl.constexpr, SCALE: tl.constexpr,
    LEAST: tl.constexpr, JITTER: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """A token's TOP_K experts and their shares, as `Routing` says.  A NaN makes all shares NaN."""
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = expert < EXPERTS
    given = tl.load(logits + token * EXPERTS + expert, there, float("-inf")).to(tl.float32)
    unsound = tl.max((given != given).to(tl.int32), 0) > 0
    values = tl.where(given != given, float("-inf"), given)
    if SCORING == "sigmoid":
        scores = tl.where(there, 1 / (1 + tl.exp(-values)), 0.0)
    else:
        scores = tl.where(there, tl.exp(values - tl.max(values, 0)), 0.0)
        scores = scores / tl.sum(scores, 0)
    logit = values
    if BY_SCORE:
        values = tl.where(there, scores, float("-inf"))
    if CORRECTED:
        values += tl.load(correction + expert, there, 0.0)
    if GROUPS:
        values = tl.where(_in_kept_groups(values, expert, there, EXPERTS // GROUPS, GROUPS, KEPT, NUM_BEST), values,
                          float("-inf"))
    total = 1.0
    if NORMALIZED:
        left = there
        total = 0.0
        for _ in tl.static_range(TOP_K):
            best = _best(values, expert, left)
            left = left & (expert != best)
            total += tl.sum(tl.where(expert == best, scores, 0.0), 0)
        total = tl.maximum(total, LEAST)
    left = there
    for rank in tl.static_range(TOP_K):
        best = _best(values, expert, left)
        share = tl.sum(tl.where(expert == best, scores, 0.0), 0) / total * SCALE
        if SCORING == "sparse_mixer":
            largest = tl.sum(tl.where(expert == best, logit, 0.0), 0)
            near = left & ((largest - logit) <= 2 * JITTER * tl.maximum(tl.abs(logit), largest))
            share = SCALE / tl.sum(tl.where(near, tl.exp(logit - largest), 0.0), 0)
        left = left & (expert != best)
        tl.store(chosen + token * TOP_K + rank, best)
        tl.store(shares + token * TOP_K + rank, tl.where(unsound, float("nan"), share))


@jit
def _in_kept_groups(
    values: tl.tensor, expert: tl.tensor, there: tl.tensor, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, NUM_BEST: tl.constexpr,
) -> tl.tensor:
    """Whether each expert is in one of the KEPT groups with the largest sums of their NUM_BEST largest values."""
    group = expert // SIZE
    sums = values
    for number in tl.static_range(GROUPS):
        left = there & (group == number)
        total = 0.0
        for _ in tl.static_range(NUM_BEST):
            best = _best(values, expert, left)
            left = left & (expert != best)
            total += tl.sum(tl.where(expert == best, values, 0.0), 0)
        sums = tl.where(group == number, total, sums)
    kept = there & (expert < 0)
    for _ in tl.static_range(KEPT):
        best = _best(sums, expert, there & (kept == 0))
        kept = kept | (there & (group == best // SIZE))
    return kept


@jit
def _best(scores: tl.tensor, expert: tl.tensor, left: tl.tensor) -> tl.tensor:
    """Of the experts that are left, the first with the largest score."""
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
    expert, is_empty, present, row, to = rows_of_tile(pairs, starts, num_experts, TOP_K, FIRST, BLOCK_M)
    if is_empty:
        return
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there, column = output < OUTPUTS, tl.arange(0, BLOCK_K)
    matrix = weight + expert * OUTPUTS * DEPTH
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for first in range(0, DEPTH, BLOCK_K):
        inside = first + column < DEPTH
        left = tl.load(x + row[:, None] * DEPTH + (first + column)[None, :], present[:, None] & inside[None, :], 0.0)
        right = tl.load(matrix + output[None, :] * DEPTH + (first + column)[:, None],
                        there[None, :] & inside[:, None], 0.0)
        total = tl.dot(left.to(OPERAND), right.to(OPERAND), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + expert * OUTPUTS + output, there, 0.0).to(tl.float32)[None, :]
    tl.store(out + to[:, None] * OUTPUTS + output[None, :], total.to(out.dtype.element_ty),
             present[:, None] & there[None, :])


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

"""Compressed attention (`LatentShape`): its cache, what is stored in it, and attention over it.

    query ─► q_nope @ key_up, per head ─► attend over latents ─► @ value_up, per head
             torch.bmm                    `attend_latents`      torch.bmm

All heads are queries of one key, whose first numbers are the value, so a program reads a row of the cache once for both
products.  Its tile is a few packed queries of a row (`attention.py` numbers tiles and packs queries: token by token, of
each all heads).  A context is cut into segments at fixed positions, each with a softmax of its own, merged in order.
With few tokens the segments of a tile are divided among programs, and a second kernel merges them; with many a program
walks them all.  So a position's sums have the same order in a prompt's chunk and alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda import configs
from slotwise.compute.kernels.cuda.attention import (
    LOG2_E,
    SMALLEST_TILE,
    SPLIT_TOKENS,
    combine_segments,
    find_tile,
    merge_weights,
    num_programs,
    num_tiles,
)
from slotwise.compute.kernels.cuda.configs import SEGMENT
from slotwise.compute.kernels.cuda.jit import OPERANDS, jit, jit_varying
from slotwise.compute.kernels.interface import FP8_LARGEST, LatentNorm, LatentShape, RaggedBatch

# Heads whose rotary parts a program turns.
HEADS_A_PROGRAM = 8
# Bytes that the results of segments may take before they are merged.
MOST_PARTIAL = 1 << 28


@dataclass(frozen=True, slots=True)
class CudaLatentCache:
    """One layer's latents and rotary keys, `[blocks, block_size, rank + rope_dim]`, contiguous."""

    storage: Tensor

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, shape: LatentShape, kind: torch.dtype, device: torch.device,
    ) -> CudaLatentCache:
        """A zeroed cache."""
        return cls(torch.zeros(num_blocks, block_size, shape.width, dtype=kind, device=device))

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.storage.shape[1]


class LatentProducts(NamedTuple):
    """What is absorbed: `[heads, nope_dim, rank]` of keys, `[heads, rank, value_dim]` of values."""

    key_up: Tensor
    value_up: Tensor


def store(
    query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CudaLatentCache, shape: LatentShape,
    norm: LatentNorm,
) -> Tensor:
    """Norm and rotate what is stored; the rotary part of queries is rotated in place."""
    if not len(query):
        return query
    half = shape.rope_dim // 2
    grid = (len(query), 1 + triton.cdiv(shape.num_heads, HEADS_A_PROGRAM))
    _store[grid](
        query, compressed.contiguous(), cache.storage, rotary, norm.weight, norm.eps, batch.positions,
        batch.slot_mapping, HEADS=shape.num_heads, NOPE=shape.nope_dim, RANK=shape.rank, HALF=half,
        STEP=2 if shape.has_neighbors else 1, APART=1 if shape.has_neighbors else half,
        BLOCK_R=triton.next_power_of_2(shape.rank), BLOCK_HALF=triton.next_power_of_2(half), BLOCK_H=HEADS_A_PROGRAM,
        LARGEST=FP8_LARGEST if cache.storage.itemsize == 1 else None, num_warps=4)
    return query


@jit_varying(alignments=("positions", "slots"))
def _store(
    query: tl.tensor, compressed: tl.tensor, storage: tl.tensor, rotary: tl.tensor, norm: tl.tensor, eps: tl.tensor,
    positions: tl.tensor, slots: tl.tensor, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr,
    HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, LARGEST: tl.constexpr,
) -> None:
    """A program stores a token's latent and key, or turns a few heads of its query."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    angle = tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
    cosine = tl.load(rotary + angle, pair < HALF, 0.0)
    sine = tl.load(rotary + angle + HALF, pair < HALF, 0.0)
    if part > 0:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
        at = query + ((token * HEADS + head) * (NOPE + 2 * HALF) + NOPE)[:, None] + (pair * STEP)[None, :]
        low = tl.load(at, inside, 0.0).to(tl.float32)
        high = tl.load(at + APART, inside, 0.0).to(tl.float32)
        kind = query.dtype.element_ty
        tl.store(at, (low * cosine[None, :] - high * sine[None, :]).to(kind), inside)
        tl.store(at + APART, (high * cosine[None, :] + low * sine[None, :]).to(kind), inside)
        return
    column = tl.arange(0, BLOCK_R)
    source, to = compressed + token * (RANK + 2 * HALF), storage + tl.load(slots + token).to(tl.int64) * (
        RANK + 2 * HALF)
    latent = tl.load(source + column, column < RANK, 0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent = latent * factor * tl.load(norm + column, column < RANK, 0.0)
    low = tl.load(source + RANK + pair * STEP, pair < HALF, 0.0).to(tl.float32)
    high = tl.load(source + RANK + pair * STEP + APART, pair < HALF, 0.0).to(tl.float32)
    first, second = low * cosine - high * sine, high * cosine + low * sine
    if LARGEST is not None:
        latent = tl.clamp(latent, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        first = tl.clamp(first, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    kind = storage.dtype.element_ty
    tl.store(to + column, latent.to(kind), column < RANK)
    tl.store(to + RANK + pair * STEP, first.to(kind), pair < HALF)
    tl.store(to + RANK + pair * STEP + APART, second.to(kind), pair < HALF)


def attend(
    query: Tensor, cache: CudaLatentCache, batch: RaggedBatch, shape: LatentShape, products: LatentProducts,
    capability: int = configs.AMPERE,
) -> Tensor:
    """Queries of every head over the latents, between the absorbed products: `[tokens, heads * value_dim]`."""
    tokens, heads, rank, rows = len(query), shape.num_heads, shape.rank, len(batch.context_lens)
    if not tokens:
        return query.new_empty(0, heads * shape.value_dim)
    nope, rope = query.view(tokens, heads, shape.query_dim).split([shape.nope_dim, shape.rope_dim], dim=-1)
    absorbed = torch.cat((torch.bmm(nope.transpose(0, 1), products.key_up).transpose(0, 1), rope), dim=-1).contiguous()
    found = query.new_empty(tokens, heads, rank)
    room = batch.max_context_len // SEGMENT + 1
    splits = tokens <= SPLIT_TOKENS and room > 1 and 4 * tokens * heads * room * rank <= MOST_PARTIAL
    partials, states = found, found
    if splits:
        partials = found.new_empty(tokens, heads, room, rank, dtype=torch.float32)
        states = found.new_empty(tokens, heads, room, 2, dtype=torch.float32)
    tiles = num_tiles(tokens, rows, heads, SMALLEST_TILE)
    block_r = max(SMALLEST_TILE, triton.next_power_of_2(rank))
    is_narrow = query.itemsize == 2
    attend_latents[(tiles, num_programs(tiles, 1, room) if splits else 1)](
        found, partials, states, absorbed, cache.storage, batch.block_tables, batch.block_tables.stride(0),
        batch.query_starts, batch.context_lens, rows, shape.scale * LOG2_E, room, HEADS=heads, RANK=rank,
        ROPE=shape.rope_dim, BLOCK_R=block_r, BLOCK_P=max(SMALLEST_TILE, triton.next_power_of_2(shape.rope_dim)),
        BLOCK_SIZE=cache.block_size, OPERAND=OPERANDS[query.dtype], SEGMENT=SEGMENT, SPLITS=splits,
        BLOCK_M=SMALLEST_TILE, BLOCK_N=32 if is_narrow else 16, num_warps=8,
        num_stages=configs.latent_stages(capability) if is_narrow else 1)
    if splits:
        longest = batch.max_query_len
        combine_segments[(rows, heads, longest)](
            found, partials, states, batch.query_starts, batch.context_lens, room, longest, HEADS=heads, HEAD_DIM=rank,
            BLOCK_D=block_r, WINDOW=0, SEGMENT=SEGMENT, num_warps=2)
    return torch.bmm(found.transpose(0, 1), products.value_up).transpose(0, 1).reshape(tokens, -1)


@jit_varying("table_stride", "num_rows", "room", alignments=("tables", "query_starts", "context_lens"))
def attend_latents(
    out: tl.tensor, partials: tl.tensor, states: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor, num_rows: tl.tensor, scale: tl.tensor,
    room: tl.tensor, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, OPERAND: tl.constexpr, SEGMENT: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """A tile's segments: to `partials` and `states` (`attend_segments`) where `SPLITS`, else merged to `out`."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # last tiles of rows, which take longest, first
    row, start, length, begin = find_tile(query_starts, tile, num_rows, HEADS, BLOCK_M)
    if begin >= length * HEADS:
        return
    packed = begin + tl.arange(0, BLOCK_M)
    present = packed < length * HEADS
    context_len = tl.load(context_lens + row)
    positions = context_len - length + packed // HEADS
    last = context_len - length + (tl.minimum(begin + BLOCK_M, length * HEADS) - 1) // HEADS
    # Those of the row, of which the tile may see none at the end: they are merged for all of its tokens.
    segments = (context_len if SPLITS else last + 1) + SEGMENT - 1
    column, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    place = start.to(tl.int64) * HEADS + packed
    inside = present[:, None] & (column < RANK)[None, :]
    at = query + (place * (RANK + ROPE))[:, None]
    latent_query = tl.load(at + column[None, :], inside, 0.0).to(OPERAND)
    rope_query = tl.load(
        at + RANK + turned[None, :], present[:, None] & (turned < ROPE)[None, :], 0.0).to(OPERAND)
    table = tables + row.to(tl.int64) * table_stride
    total = tl.full([BLOCK_M, BLOCK_R], 0.0, tl.float32)
    weight, largest = tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    for segment in range(tl.program_id(1), segments // SEGMENT, tl.num_programs(1)):
        part, part_weight, part_largest = attend_segment(
            latent_query, rope_query, positions, storage, table, segment * SEGMENT,
            tl.minimum((segment + 1) * SEGMENT, last + 1), last, scale, RANK, ROPE, BLOCK_R, BLOCK_P, BLOCK_SIZE,
            BLOCK_M, BLOCK_N)
        if SPLITS:
            to = place * room + segment
            tl.store(states + to * 2, part_weight, present)
            tl.store(states + to * 2 + 1, part_largest, present)
            tl.store(partials + to[:, None] * RANK + column[None, :], part, inside)
        else:
            weight, largest, keep, share = merge_weights(weight, largest, part_weight, part_largest)
            total = tl.fma(part, tl.broadcast_to(share[:, None], [BLOCK_M, BLOCK_R]), total * keep[:, None])
    if not SPLITS:
        divisor = tl.where(weight == 0, 1.0, weight)[:, None]  # 0 in places past the row's end
        tl.store(out + (place * RANK)[:, None] + column[None, :], (total / divisor).to(out.dtype.element_ty), inside)


@jit
def attend_segment(
    latent_query: tl.tensor, rope_query: tl.tensor, positions: tl.tensor, storage: tl.tensor, table: tl.tensor,
    start: tl.tensor, stop: tl.tensor, last: tl.tensor, scale: tl.tensor, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The softmax of cached positions `start ... stop - 1`: the weighted sum of latents, of weights, the top score."""
    column, turned = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    total = tl.full([BLOCK_M, BLOCK_R], 0.0, tl.float32)
    weight, largest = tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    for tile in range(start, stop, BLOCK_N):
        place = tile + tl.arange(0, BLOCK_N)
        readable = place <= last
        block = tl.load(table + place // BLOCK_SIZE, readable, 0).to(tl.int64)
        at = storage + ((block * BLOCK_SIZE + place % BLOCK_SIZE) * (RANK + ROPE))[:, None]
        latents = tl.load(at + column, readable[:, None] & (column < RANK), 0.0).to(latent_query.dtype)
        keys = tl.load(at + RANK + turned, readable[:, None] & (turned < ROPE), 0.0).to(rope_query.dtype)
        scores = tl.dot(latent_query, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rope_query, tl.trans(keys), scores, input_precision="ieee") * scale
        visible = (place[None, :] <= positions[:, None]) & readable[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        weight = weight * shrink + tl.sum(shares, 1)
        total = tl.dot(shares.to(latents.dtype), latents, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total, weight, largest

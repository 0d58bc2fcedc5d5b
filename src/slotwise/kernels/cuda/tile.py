"""The inner loop of attention: one tile of queries over a range of cached positions.

Online softmax in base 2 (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023).  The query heads that share a key
head (GQA) are packed into one tile, so each key and value is read once for all of them:

    packed row i of a sequence     token i // GROUP, head kv_head * GROUP + i % GROUP

Positions are mapped through the block table one by one, so a tile works with any block size.  No place is read that
the tile's queries may not see: an unused or freed block may hold anything, NaN too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slotwise.kernels.cuda.jit import jit


@jit
def load_query(
    query: tl.tensor, packed: tl.tensor, start: tl.tensor, length: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OPERAND: tl.constexpr,
) -> tl.tensor:
    """Packed rows `packed [BLOCK_M]` of the sequence whose tokens are `start ... start + length - 1`; zero past it."""
    column = tl.arange(0, BLOCK_D)
    inside = (packed < length * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at = query_offset(packed, start, kv_head, KV_HEADS, GROUP, HEAD_DIM)[:, None] + column[None, :]
    return tl.load(query + at, inside, 0.0).to(OPERAND)


@jit
def store_query(
    out: tl.tensor, tensor: tl.tensor, packed: tl.tensor, start: tl.tensor, length: tl.tensor, kv_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:
    """Write packed rows where `load_query` reads them, rounded to the type of `out`; none past the sequence's end."""
    column = tl.arange(0, BLOCK_D)
    inside = (packed < length * GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    to = query_offset(packed, start, kv_head, KV_HEADS, GROUP, HEAD_DIM)[:, None] + column[None, :]
    tl.store(out + to, tensor.to(out.dtype.element_ty), inside)


@jit
def query_offset(
    packed: tl.tensor, start: tl.tensor, kv_head: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Offsets of packed rows in `[tokens, heads, head_dim]`, int64."""
    token = (start + packed // GROUP).to(tl.int64)
    return (token * (KV_HEADS * GROUP) + kv_head * GROUP + packed % GROUP) * HEAD_DIM


@jit
def start_softmax(
    sinks: tl.tensor, packed: tl.tensor, kv_head: tl.tensor, GROUP: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Sum of weights and largest score of packed rows before any position: nothing, or the sink of each head."""
    weight = tl.full([BLOCK_M], 0.0, tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        weight += 1.0
        largest = tl.load(sinks + kv_head * GROUP + packed % GROUP) * 1.4426950408889634  # log2(e)
    return weight, largest


@jit
def start_segment(
    sinks: tl.tensor, packed: tl.tensor, positions: tl.tensor, kv_head: tl.tensor, segment: tl.tensor,
    GROUP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """`start_softmax` of one segment: sinks belong to the first segment that a query sees."""
    weight, largest = start_softmax(sinks, packed, kv_head, GROUP, SINKS, BLOCK_M)
    if SINKS:
        first = tl.maximum(positions - WINDOW + 1, 0) if WINDOW else positions * 0
        is_first = first // SEGMENT == segment
        weight = tl.where(is_first, weight, 0.0)
        largest = tl.where(is_first, largest, float("-inf"))
    return weight, largest


@jit
def merge_weights(
    weight: tl.tensor, largest: tl.tensor, other_weight: tl.tensor, other_largest: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Merge a segment's weights and largest scores into those before it; returns both, and the factors of the sums."""
    both = tl.maximum(largest, other_largest)
    base = tl.where(both == float("-inf"), 0.0, both)
    keep, share = tl.exp2(largest - base), tl.exp2(other_largest - base)
    return tl.fma(other_weight, share, weight * keep), both, keep, share


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent: near 0 by its series, where the other form, 2 / (1 + e**(-2 * x)) - 1, cancels."""
    square = x * x
    series = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(square < 0.0625, series, 2.0 / (1.0 + tl.exp2(-2.8853900817779268 * x)) - 1.0)


@jit
def attend_tile(
    total: tl.tensor, weight: tl.tensor, largest: tl.tensor, query: tl.tensor, positions: tl.tensor, storage: tl.tensor,
    table: tl.tensor, kv_head: tl.tensor, start: tl.tensor, stop: tl.tensor, first: tl.tensor, last: tl.tensor,
    scale: tl.tensor, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Add the cached positions `start ... stop - 1` to the running softmax, by BLOCK_N; returns its first three.

    Args:
        total: weighted sum of values so far, `[BLOCK_M, BLOCK_D]` float32.
        weight: sum of weights so far, `[BLOCK_M]` float32.
        largest: largest score so far, `[BLOCK_M]` float32, in units of log 2.
        query: `[BLOCK_M, BLOCK_D]`, in the operand type of products.
        positions: of the queries, `[BLOCK_M]`.
        first, last: positions outside of `first ... last` are seen by no query of the tile.  Used where MASKED; else
            every query sees all of `start ... stop - 1`, a whole number of tiles.
        scale: of scores, log2(e) included, as in SOFT_CAP.
    """
    column = tl.arange(0, BLOCK_D)
    in_head = (column < HEAD_DIM)[None, :]
    for tile in range(start, stop, BLOCK_N):
        place = tile + tl.arange(0, BLOCK_N)
        if MASKED:
            readable = (place >= first) & (place <= last)
            block = tl.load(table + place // BLOCK_SIZE, readable, 0).to(tl.int64)
            inside = readable[:, None] & in_head
        else:
            block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
            inside = in_head
        at = ((block * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD_DIM
        pointers = storage + at[:, None] + column[None, :]
        keys = tl.load(pointers, inside, 0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = SOFT_CAP * tanh(scores / SOFT_CAP)
        if MASKED:
            visible = (place[None, :] <= positions[:, None]) & readable[None, :]
            if WINDOW:
                visible &= place[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A query that has seen no position yet has -inf for its largest score, and -inf - -inf is NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest) if MASKED else new_largest
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        weight = weight * shrink + tl.sum(shares, 1)
        values = tl.load(pointers + KV_HEADS * BLOCK_SIZE * HEAD_DIM, inside, 0.0).to(query.dtype)
        total = tl.dot(shares.to(query.dtype), values, total * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return total, weight, largest


INTERPRETED = not isinstance(attend_tile, triton.JITFunction)
"""Whether these kernels were defined under Triton's interpreter, and run on the CPU."""

# The interpreter multiplies the bits of bfloat16 instead of its values.
OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
            torch.float16: tl.float32 if INTERPRETED else tl.float16}
"""What tensor cores multiply, by the type of tensors."""

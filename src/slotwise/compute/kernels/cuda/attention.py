"""Attention over the paged cache: the cache's layout, the kernels' inner loop, rows with few and with many new tokens.

The inner loop, `attend_tile`, multiplies one tile of queries with a range of cached positions, by online softmax in
base 2 (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023).  The query heads that share a key head (GQA) are
packed into one tile, so each key and value is read once for all of them:

    packed row i of a sequence     token i // GROUP, head kv_head * GROUP + i % GROUP

Positions are mapped through the block table one by one, so a tile works with any block size.  Positions that the tile's
queries may not see are not read: an unused or freed block may hold anything, also NaN.

A context is cut into segments at fixed positions, each with a softmax of its own, and a query's segments are merged in
order.  Rows with few new tokens are split along their context among programs; rows with many are cut into tiles of
queries.  So a position's sums have the same order in a prompt's chunk and alone.  Nothing here waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.configs import Tuning
from slotwise.compute.kernels.cuda.jit import OPERANDS, jit, jit_varying
from slotwise.compute.kernels.interface import AttentionShape, RaggedBatch


@dataclass(frozen=True, slots=True)
class CudaCache:
    """One layer's keys and values.

    One block of one key-value head is contiguous, so a program that attends for one head reads contiguous memory.  All
    of a block lies together, keys before values, so one copy per layer moves a block.

    Args:
        storage: `[blocks, 2, kv_heads, block_size, head_dim]`, contiguous; keys at 0, values at 1.
    """

    storage: Tensor

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, shape: AttentionShape, kind: torch.dtype, device: torch.device
    ) -> CudaCache:
        """A zeroed cache."""
        size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
        return cls(torch.zeros(size, dtype=kind, device=device))

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.storage.shape[3]

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Views of both as `[blocks, block_size, kv_heads, head_dim]`, for tests and tools."""
        keys, values = self.storage.unbind(1)
        return keys.transpose(1, 2), values.transpose(1, 2)


def bytes_per_block(block_size: int, shape: AttentionShape, kind: torch.dtype) -> int:
    """Bytes one block takes in one layer, keys and values together."""
    return 2 * shape.num_kv_heads * block_size * shape.head_dim * kind.itemsize


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
def first_seen(positions: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first place that a query sees; a window below 0 is a chunk of that size, and one of 0 has no limit."""
    if WINDOW < 0:
        return positions // -WINDOW * -WINDOW
    return tl.maximum(positions - WINDOW + 1, 0) if WINDOW else positions * 0


@jit
def start_segment(
    sinks: tl.tensor, packed: tl.tensor, positions: tl.tensor, kv_head: tl.tensor, segment: tl.tensor,
    GROUP: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """`start_softmax` of one segment: sinks belong to the first segment that a query sees."""
    weight, largest = start_softmax(sinks, packed, kv_head, GROUP, SINKS, BLOCK_M)
    if SINKS:
        first = first_seen(positions, WINDOW)
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
    scale: tl.tensor, biases: tl.tensor, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, SOFT_CAP: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
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
        biases: addresses of those of each query's head, `[BLOCK_M]`.  Used where BIASED.
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
        if BIASED:
            known = place[None, :] <= last if MASKED else place[None, :] >= 0
            scores += tl.load(biases[:, None] + place[None, :], known, 0.0) * 1.4426950408889634  # log2(e)
        if MASKED:
            visible = (place[None, :] <= positions[:, None] + AHEAD) & readable[None, :]
            if WINDOW:
                visible &= place[None, :] >= first_seen(positions, WINDOW)[:, None]
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


# Attention of rows with few new tokens: a long context is split among programs, then combined (flash-decoding, Dao,
# Haziza, Massa and Sizov, 2023).
#
#     a segment   positions s * SEGMENT ... (s + 1) * SEGMENT - 1, of which a row has those that its queries see
#     programs    the same number for every row; program i takes segments i, i + programs, ..., and may find none
#     results     of decode rows one for each row, segment and head; of rows with drafts one for each of their tokens
#
# The grid depends on the number of rows and the longest context only, so a captured launch serves every shorter one.

# Programs in a grid: a row far longer than its batch-mates is then still spread over many.
ENOUGH_PROGRAMS = 8192


def num_programs(rows: int, kv_heads: int, segments: int) -> int:
    """Programs per row and key head, for rows of at most `segments` segments."""
    return max(1, min(segments, ENOUGH_PROGRAMS // (rows * kv_heads)))


def num_segments(max_context_len: int, visible: int, segment: int) -> int:
    """The most segments of `segment` positions that a row of `max_context_len` tokens has, which sees `visible`."""
    return min(-(-max_context_len // segment), -(-visible // segment) + 1)


@jit
def row_segments(
    context_len: tl.tensor, length: tl.tensor, WINDOW: tl.constexpr, SEGMENT: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """First position a row may see, its first segment, and the number of its segments."""
    first = first_seen(context_len - length, WINDOW)
    return first, first // SEGMENT, (context_len + SEGMENT - 1) // SEGMENT - first // SEGMENT


@jit
def first_place(row: tl.tensor, start: tl.tensor, short: tl.tensor) -> tl.tensor:
    """Where the results of a row's first token are: tokens have places of their own where rows have several."""
    return tl.where(short == 1, row, start)


@jit_varying("table_stride", "short", "room", "num_biases", alignments=("tables", "query_starts", "context_lens"))
def attend_segments(
    partials: tl.tensor, states: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor, short: tl.tensor, scale: tl.tensor,
    room: tl.tensor, sinks: tl.tensor, biases: tl.tensor, num_biases: tl.tensor, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    AHEAD: tl.constexpr, SOFT_CAP: tl.constexpr, BIASED: tl.constexpr,
    SINKS: tl.constexpr, OPERAND: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """Each segment's own attention, for every row of at most `short` new tokens; BLOCK_M packed queries hold them.

    Args:
        partials: `[rows or tokens, heads, room, head_dim]` float32, weighted sums of values.
        states: `[rows or tokens, heads, room, 2]` float32, sums of weights and largest scores.
        room: the most segments of a row.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    if length > short:
        return
    context_len = tl.load(context_lens + row)
    first, begin, segments = row_segments(context_len, length, WINDOW, SEGMENT)
    packed = tl.arange(0, BLOCK_M)
    positions = context_len - length + packed // GROUP
    tensor = load_query(query, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, OPERAND)
    table = tables + row.to(tl.int64) * table_stride
    of_heads = biases + (kv_head * GROUP + packed % GROUP).to(tl.int64) * num_biases
    column = tl.arange(0, BLOCK_D)
    present = packed < length * GROUP
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    unsplit = query_offset(packed, first_place(row, start, short), kv_head, KV_HEADS, GROUP, 1)
    for split in range(tl.program_id(2), segments, tl.num_programs(2)):
        segment = begin + split
        weight, largest = start_segment(
            sinks, packed, positions, kv_head, segment, GROUP, SINKS, WINDOW, SEGMENT, BLOCK_M)
        total, weight, largest = attend_tile(
            tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32), weight, largest, tensor, positions, storage, table, kv_head,
            segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, context_len), first, context_len - 1, scale,
            of_heads, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, AHEAD, SOFT_CAP, BIASED, BLOCK_N, True)
        place = unsplit * room + split
        tl.store(states + place * 2, weight, present)
        tl.store(states + place * 2 + 1, largest, present)
        tl.store(partials + place[:, None] * HEAD_DIM + column[None, :], total, inside)


@jit_varying("room", "short", alignments=("query_starts", "context_lens"))
def combine_segments(
    out: tl.tensor, partials: tl.tensor, states: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor,
    room: tl.tensor, short: tl.tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SEGMENT: tl.constexpr,
) -> None:
    """`out [tokens, heads, head_dim]` of every row of at most `short` new tokens; one program per query."""
    row, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    if (length > short) | (token >= length):
        return
    _, _, segments = row_segments(tl.load(context_lens + row), length, WINDOW, SEGMENT)
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    first = ((first_place(row, start, short) + token).to(tl.int64) * HEADS + head) * room
    total = tl.full([BLOCK_D], 0.0, tl.float32)
    weight, largest = tl.full([1], 0.0, tl.float32), tl.full([1], float("-inf"), tl.float32)
    for place in range(first, first + segments):
        state = states + place * 2 + tl.arange(0, 1)
        weight, largest, keep, share = merge_weights(weight, largest, tl.load(state), tl.load(state + 1))
        part = tl.load(partials + place * HEAD_DIM + column, in_head, 0.0)
        total = tl.fma(part, tl.broadcast_to(share, [BLOCK_D]), total * keep)
    to = out + ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(to, (total / weight).to(out.dtype.element_ty), in_head)


# Attention of rows with many new tokens: one program per tile of packed queries and key head.
#
# The tiles of a step are numbered without reading row lengths from the device.  Row r, whose packed queries are
# `GROUP * query_starts[r] ... GROUP * query_starts[r + 1] - 1`, owns the tiles from
#
#     first_tile(r) = GROUP * query_starts[r] // BLOCK_M + r
#
# on, which are always enough and at most one too many; a program finds its row by bisection (as vLLM's unified Triton
# attention does).  Programs start from the last tile, since under a causal mask a row's last tiles take longest.


def num_tiles(tokens: int, rows: int, group: int, block_m: int) -> int:
    """The most tiles of `tokens` tokens in `rows` rows."""
    return tokens * group // block_m + rows


@jit
def first_tile(query_starts: tl.tensor, row: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tensor:
    """The first tile of a row's queries."""
    return tl.load(query_starts + row) * GROUP // BLOCK_M + row


@jit
def find_row(
    query_starts: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """The last row whose first tile is not behind `tile`."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(query_starts, middle, GROUP, BLOCK_M) <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def find_tile(
    query_starts: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """A tile's row, the row's first token and number of tokens, and the tile's first packed query within it."""
    row = find_row(query_starts, tile, num_rows, GROUP, BLOCK_M)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    return row, start, length, (tile - first_tile(query_starts, row, GROUP, BLOCK_M)) * BLOCK_M


@jit_varying("table_stride", "num_rows", "short", "num_biases", alignments=("tables", "query_starts", "context_lens"))
def attend_tiles(
    out: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor, table_stride: tl.tensor,
    query_starts: tl.tensor, context_lens: tl.tensor, num_rows: tl.tensor, short: tl.tensor, scale: tl.tensor,
    sinks: tl.tensor, biases: tl.tensor, num_biases: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
    SOFT_CAP: tl.constexpr, BIASED: tl.constexpr, SINKS: tl.constexpr,
    OPERAND: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """`out [tokens, heads, head_dim]` of every row of more than `short` new tokens."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    row, start, length, begin = find_tile(query_starts, tile, num_rows, GROUP, BLOCK_M)
    if (begin >= length * GROUP) | (length <= short):
        return
    packed = begin + tl.arange(0, BLOCK_M)
    context_len = tl.load(context_lens + row)
    before = context_len - length
    nearest = before + begin // GROUP  # position of the tile's first query, then of its last
    farthest = before + (tl.minimum(begin + BLOCK_M, length * GROUP) - 1) // GROUP
    first, first_for_all = first_seen(nearest, WINDOW), first_seen(farthest, WINDOW)
    last = tl.minimum(farthest + AHEAD, context_len - 1)
    last_for_all = tl.minimum(nearest + AHEAD, context_len - 1)
    # Whole tiles that every query sees need no masks; those before and behind, at the edges of what they see, do.
    whole = (first_for_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    edge = tl.maximum((last_for_all + 1) // BLOCK_N * BLOCK_N, whole)

    positions = before + packed // GROUP
    tensor = load_query(query, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, OPERAND)
    table = tables + row.to(tl.int64) * table_stride
    of_heads = biases + (kv_head * GROUP + packed % GROUP).to(tl.int64) * num_biases
    total = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    weight, largest = tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    for segment in range(first // SEGMENT, last // SEGMENT + 1):
        left, stop = segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, last + 1)
        part_weight, part_largest = start_segment(
            sinks, packed, positions, kv_head, segment, GROUP, SINKS, WINDOW, SEGMENT, BLOCK_M)
        part = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        if WINDOW:
            part, part_weight, part_largest = attend_tile(
                part, part_weight, part_largest, tensor, positions, storage, table, kv_head,
                tl.maximum(left, first // BLOCK_N * BLOCK_N), tl.minimum(whole, stop), first, last, scale, of_heads,
                KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, AHEAD, SOFT_CAP, BIASED, BLOCK_N, True)
        part, part_weight, part_largest = attend_tile(
            part, part_weight, part_largest, tensor, positions, storage, table, kv_head, tl.maximum(left, whole),
            tl.minimum(edge, stop), first, last, scale, of_heads, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW,
            AHEAD, SOFT_CAP, BIASED, BLOCK_N, False)
        part, part_weight, part_largest = attend_tile(
            part, part_weight, part_largest, tensor, positions, storage, table, kv_head, tl.maximum(left, edge), stop,
            first, last, scale, of_heads, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, AHEAD, SOFT_CAP, BIASED,
            BLOCK_N, True)
        weight, largest, keep, share = merge_weights(weight, largest, part_weight, part_largest)
        total = tl.fma(part, tl.broadcast_to(share[:, None], [BLOCK_M, BLOCK_D]), total * keep[:, None])
    divisor = tl.where(weight == 0, 1.0, weight)[:, None]  # 0 in places past the row's end
    store_query(out, total / divisor, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)


LOG2_E = math.log2(math.e)
# Rows of the smallest `tl.dot`.
SMALLEST_TILE = 16
# The most tokens of a step whose rows with drafts are split, too: each token takes memory for all its segments.
SPLIT_TOKENS = 128


def attend(
    query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, tuning: Tuning,
    sinks: Tensor | None = None, biases: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own cached context: `[tokens, heads * head_dim]`.

    Rows of few new tokens are split along their context; the others are cut into tiles of queries.
    """
    query = query.contiguous()
    out = torch.empty_like(query)
    if not len(query):
        return out.flatten(1)
    longest = batch.max_query_len
    layer = _Layer(shape, sinks, biases, short_row(longest, len(query), shape))
    if longest > layer.short:
        _attend_long(out, query, cache, batch, layer, tuning)
    if longest <= layer.short or len(query) < len(batch.context_lens) * longest:  # else all have `longest` new tokens
        _attend_short(out, query, cache, batch, layer, tuning)
    return out.flatten(1)


class _Layer(NamedTuple):
    """What is the same for all rows; `short` is the most new tokens of a row that is split along its context."""

    shape: AttentionShape
    sinks: Tensor | None
    biases: Tensor | None
    short: int

    def biases_or(self, other: Tensor) -> tuple[Tensor, int]:
        """The biases and their number by head, or another address, which is not read."""
        return (other, 0) if self.biases is None else (self.biases, self.biases.shape[1])


def short_row(longest: int, tokens: int, shape: AttentionShape) -> int:
    """The most new tokens of a row that is split along its context, in a step with rows of up to `longest`.

    As many as the smallest tile holds with the query heads of a key head; larger tiles spill registers.  With 1 partial
    results have a place for each row, with more one for each token: so there are few tokens then.
    """
    if longest == 1 or tokens > SPLIT_TOKENS:
        return 1
    return max(1, SMALLEST_TILE * shape.num_kv_heads // shape.num_heads)


def _attend_long(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, layer: _Layer, tuning: Tuning
) -> None:
    shape = layer.shape
    group, rows, chosen = shape.num_heads // shape.num_kv_heads, len(batch.context_lens), tuning.prefill
    tiles = num_tiles(len(query), rows, group, chosen.block_m)
    attend_tiles[(tiles * shape.num_kv_heads,)](
        out, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, rows, layer.short, shape.scale * LOG2_E, query if layer.sinks is None else layer.sinks,
        *layer.biases_or(query),
        **_geometry(query, cache, layer), SEGMENT=tuning.segment,
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps, num_stages=chosen.num_stages)


def _attend_short(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, layer: _Layer, tuning: Tuning
) -> None:
    shape = layer.shape
    heads, kv_heads, rows, chosen = shape.num_heads, shape.num_kv_heads, len(batch.context_lens), tuning.decode
    geometry = _geometry(query, cache, layer) | {"SEGMENT": tuning.segment}
    short, places = layer.short, rows if layer.short == 1 else len(query)
    packed = max(SMALLEST_TILE, triton.next_power_of_2(short * heads // kv_heads))
    visible = shape.window + short - 1 if shape.window else batch.max_context_len
    room = num_segments(batch.max_context_len, visible, tuning.segment)
    partials = query.new_empty(places, heads, room, shape.head_dim, dtype=torch.float32)
    states = query.new_empty(places, heads, room, 2, dtype=torch.float32)
    attend_segments[(rows, kv_heads, num_programs(rows, kv_heads, room))](
        partials, states, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, short, shape.scale * LOG2_E, room, query if layer.sinks is None else layer.sinks,
        *layer.biases_or(query),
        **geometry, BLOCK_M=packed, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages)
    combine_segments[(rows, heads, short)](
        out, partials, states, batch.query_starts, batch.context_lens, room, short, HEADS=heads,
        HEAD_DIM=shape.head_dim, BLOCK_D=geometry["BLOCK_D"], WINDOW=shape.span, SEGMENT=tuning.segment, num_warps=2)


def _geometry(query: Tensor, cache: CudaCache, layer: _Layer) -> dict[str, Any]:
    """The compile-time constants of a layer's kernels."""
    shape = layer.shape
    return {
        "KV_HEADS": shape.num_kv_heads, "GROUP": shape.num_heads // shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim, "BLOCK_D": max(SMALLEST_TILE, triton.next_power_of_2(shape.head_dim)),
        "BLOCK_SIZE": cache.block_size, "WINDOW": shape.span, "AHEAD": shape.ahead, "OPERAND": OPERANDS[query.dtype],
        "SOFT_CAP": shape.soft_cap * LOG2_E, "SINKS": layer.sinks is not None,
        "BIASED": layer.biases is not None,
    }

"""Attention of rows with few new tokens: a long context is split among programs, then combined.

That is flash-decoding (Dao, Haziza, Massa and Sizov, 2023), with the query heads of a key head packed into one tile.
Where a context is split depends on positions alone, and splits are merged in order, as `prefill.py` merges them:

    a segment   positions s * SEGMENT ... (s + 1) * SEGMENT - 1, of which a row has those that its queries see
    programs    the same number for every row; program i takes segments i, i + programs, ..., and may find none
    results     of decode rows one for each row, segment and head; of rows with drafts one for each of their tokens

The grid depends on the number of rows and the longest context only, so a captured launch serves every shorter one.
"""

from __future__ import annotations

import triton.language as tl

from slotwise.kernels.cuda.jit import jit, jit_varying
from slotwise.kernels.cuda.tile import attend, load_query, merge_weights, query_offset, start_segment

ENOUGH_PROGRAMS = 8192  # in a grid: a row far longer than its batch-mates is then still spread over many


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
    first = tl.maximum(context_len - length - WINDOW + 1, 0) if WINDOW else 0
    return first, first // SEGMENT, (context_len + SEGMENT - 1) // SEGMENT - first // SEGMENT


@jit
def first_place(row: tl.tensor, start: tl.tensor, short: tl.tensor) -> tl.tensor:
    """Where the results of a row's first token are: tokens have places of their own where rows have several."""
    return tl.where(short == 1, row, start)


@jit_varying("table_stride", "short", "room", alignments=("tables", "query_starts", "context_lens"))
def attend_segments(
    partials: tl.tensor, states: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor, short: tl.tensor, scale: tl.tensor,
    room: tl.tensor, sinks: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    OPERAND: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
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
    column = tl.arange(0, BLOCK_D)
    present = packed < length * GROUP
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    unsplit = query_offset(packed, first_place(row, start, short), kv_head, KV_HEADS, GROUP, 1)
    for split in range(tl.program_id(2), segments, tl.num_programs(2)):
        segment = begin + split
        weight, largest = start_segment(
            sinks, packed, positions, kv_head, segment, GROUP, SINKS, WINDOW, SEGMENT, BLOCK_M)
        total, weight, largest = attend(
            tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32), weight, largest, tensor, positions, storage, table, kv_head,
            segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, context_len), first, context_len - 1, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, True)
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

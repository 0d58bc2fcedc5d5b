"""Attention of rows with few new tokens: a long context is split among programs, then combined.

That is flash-decoding (Dao, Haziza, Massa and Sizov, 2023), with the query heads of a key head packed into one tile.
Where a row's context is cut depends on that row alone, so its result is bit-identical in any batch:

    a split     the smallest multiple of MIN_SPLIT positions of which MAX_SPLITS cover what the row may see
    programs    the same number for every row; program i takes splits i, i + programs, ..., and may find none

The grid depends on the number of rows and the longest context only, so a captured launch serves every shorter one.
"""

from __future__ import annotations

import triton.language as tl

from slotwise.kernels.cuda.jit import jit, jit_varying
from slotwise.kernels.cuda.tile import attend, load_query, query_offset, start_softmax

ENOUGH_PROGRAMS = 8192  # in a grid: a row far longer than its batch-mates is then still spread over many


def num_programs(rows: int, kv_heads: int, splits: int) -> int:
    """Programs per row and key head, for rows of at most `splits` splits."""
    return max(1, min(splits, ENOUGH_PROGRAMS // (rows * kv_heads)))


def num_splits(max_context_len: int, min_split: int, max_splits: int) -> int:
    """The most splits of a row of `max_context_len` tokens."""
    return min(max_splits, -(-max_context_len // min_split))


@jit
def row_splits(
    context_len: tl.tensor, length: tl.tensor, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """First position a row may see, where its first split begins, positions of a split, number of splits."""
    first = tl.maximum(context_len - length - WINDOW + 1, 0) if WINDOW else 0
    begin = first // MIN_SPLIT * MIN_SPLIT
    shares = (context_len - begin + MIN_SPLIT * MAX_SPLITS - 1) // (MIN_SPLIT * MAX_SPLITS)
    size = tl.maximum(shares, 1) * MIN_SPLIT  # a row without context has no splits; avoids a division by zero
    return first, begin, size, (context_len - begin + size - 1) // size


@jit_varying("table_stride", "room", alignments=("tables", "query_starts", "context_lens"))
def attend_splits(
    partials: tl.tensor, logs: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor,
    table_stride: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor, scale: tl.tensor, room: tl.tensor,
    sinks: tl.tensor, SHORT: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
) -> None:
    """Each split's own attention, for every row of at most SHORT new tokens; BLOCK_M packed queries hold them.

    Args:
        partials: `[rows, SHORT, heads, room, head_dim]` float32, normalised.
        logs: `[rows, SHORT, heads, room]` float32, log2 of the sum of the weights.
        room: the most splits of a row.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    if length > SHORT:
        return
    context_len = tl.load(context_lens + row)
    first, begin, size, splits = row_splits(context_len, length, WINDOW, MIN_SPLIT, MAX_SPLITS)
    packed = tl.arange(0, BLOCK_M)
    positions = context_len - length + packed // GROUP
    tensor = load_query(query, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, OPERAND)
    table = tables + row.to(tl.int64) * table_stride
    column = tl.arange(0, BLOCK_D)
    present = packed < length * GROUP
    inside = present[:, None] & (column < HEAD_DIM)[None, :]
    unsplit = query_offset(packed, row * SHORT, kv_head, KV_HEADS, GROUP, 1)
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        left = begin + split * size
        weight, largest = start_softmax(sinks, packed, kv_head, GROUP, SINKS, BLOCK_M)
        if SINKS:  # they belong to the first split
            weight = tl.where(split == 0, weight, 0.0)
            largest = tl.where(split == 0, largest, float("-inf"))
        total, weight, largest = attend(
            tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32), weight, largest, tensor, positions, storage, table, kv_head,
            left, tl.minimum(left + size, context_len), first, context_len - 1, scale, KV_HEADS, HEAD_DIM, BLOCK_D,
            BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, True)
        place = unsplit * room + split
        divisor = tl.where(weight == 0, 1.0, weight)  # 0 where a query's window begins behind this split
        tl.store(logs + place, largest + tl.log2(divisor), present)
        result = total / divisor[:, None]
        tl.store(partials + place[:, None] * HEAD_DIM + column[None, :], result, inside)


@jit_varying("room", alignments=("query_starts", "context_lens"))
def combine_splits(
    out: tl.tensor, partials: tl.tensor, logs: tl.tensor, query_starts: tl.tensor, context_lens: tl.tensor,
    room: tl.tensor, SHORT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
) -> None:
    """`out [tokens, heads, head_dim]` of every row of at most SHORT new tokens; one program per query."""
    row, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    if (length > SHORT) | (token >= length):
        return
    _, _, _, splits = row_splits(tl.load(context_lens + row), length, WINDOW, MIN_SPLIT, MAX_SPLITS)
    split, column = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_D)
    present, in_head = split < splits, column < HEAD_DIM
    place = ((row * SHORT + token).to(tl.int64) * HEADS + head) * room + split
    log = tl.load(logs + place, present, float("-inf"))
    shares = tl.exp2(log - tl.max(log, 0))
    parts = tl.load(
        partials + place[:, None] * HEAD_DIM + column[None, :], present[:, None] & in_head[None, :], 0.0)
    result = tl.sum(shares[:, None] * parts, 0) / tl.sum(shares, 0)
    to = out + ((start + token).to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(to, result.to(out.dtype.element_ty), in_head)

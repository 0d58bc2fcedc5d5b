"""Attention of rows with many new tokens: one program per tile of packed queries and key head.

The tiles of a step are numbered without reading row lengths from the device.  Row r, whose packed queries are
`GROUP * query_starts[r] ... GROUP * query_starts[r + 1] - 1`, owns the tiles from

    first_tile(r) = GROUP * query_starts[r] // BLOCK_M + r

on, which are always enough and at most one too many; a program finds its row by bisection (as vLLM's unified Triton
attention does).  Programs start from the last tile, since under a causal mask a row's last tiles take longest.

A tile merges the segments of its context in order, each with a softmax of its own, as `decode.py` does with a row's: so
a position's sums have the same order in a prompt's chunk and alone.
"""

from __future__ import annotations

import triton.language as tl

from slotwise.kernels.cuda.jit import jit, jit_varying
from slotwise.kernels.cuda.tile import attend, load_query, merge_weights, start_segment, store_query


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


@jit_varying("table_stride", "num_rows", "short", alignments=("tables", "query_starts", "context_lens"))
def attend_tiles(
    out: tl.tensor, query: tl.tensor, storage: tl.tensor, tables: tl.tensor, table_stride: tl.tensor,
    query_starts: tl.tensor, context_lens: tl.tensor, num_rows: tl.tensor, short: tl.tensor, scale: tl.tensor,
    sinks: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, OPERAND: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """`out [tokens, heads, head_dim]` of every row of more than `short` new tokens."""
    kv_head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    row, start, length, begin = find_tile(query_starts, tile, num_rows, GROUP, BLOCK_M)
    if (begin >= length * GROUP) | (length <= short):
        return
    packed = begin + tl.arange(0, BLOCK_M)
    before = tl.load(context_lens + row) - length
    nearest = before + begin // GROUP  # position of the tile's first query, then of its last
    last = before + (tl.minimum(begin + BLOCK_M, length * GROUP) - 1) // GROUP
    first = tl.maximum(nearest - WINDOW + 1, 0) if WINDOW else 0
    first_for_all = tl.maximum(last - WINDOW + 1, 0) if WINDOW else 0
    # Whole tiles that every query sees need no masks; those before (a window's edge) and behind (causal) do.
    whole = (first_for_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    edge = tl.maximum((nearest + 1) // BLOCK_N * BLOCK_N, whole)

    positions = before + packed // GROUP
    tensor = load_query(query, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D, OPERAND)
    table = tables + row.to(tl.int64) * table_stride
    total = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
    weight, largest = tl.full([BLOCK_M], 0.0, tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    for segment in range(first // SEGMENT, last // SEGMENT + 1):
        left, stop = segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, last + 1)
        part_weight, part_largest = start_segment(
            sinks, packed, positions, kv_head, segment, GROUP, SINKS, WINDOW, SEGMENT, BLOCK_M)
        part = tl.full([BLOCK_M, BLOCK_D], 0.0, tl.float32)
        if WINDOW:
            part, part_weight, part_largest = attend(
                part, part_weight, part_largest, tensor, positions, storage, table, kv_head,
                tl.maximum(left, first // BLOCK_N * BLOCK_N), tl.minimum(whole, stop), first, last, scale, KV_HEADS,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, True)
        part, part_weight, part_largest = attend(
            part, part_weight, part_largest, tensor, positions, storage, table, kv_head, tl.maximum(left, whole),
            tl.minimum(edge, stop), first, last, scale, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, SOFT_CAP,
            BLOCK_N, False)
        part, part_weight, part_largest = attend(
            part, part_weight, part_largest, tensor, positions, storage, table, kv_head, tl.maximum(left, edge), stop,
            first, last, scale, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, SOFT_CAP, BLOCK_N, True)
        weight, largest, keep, share = merge_weights(weight, largest, part_weight, part_largest)
        total = tl.fma(part, tl.broadcast_to(share[:, None], [BLOCK_M, BLOCK_D]), total * keep[:, None])
    divisor = tl.where(weight == 0, 1.0, weight)[:, None]  # 0 in places past the row's end
    store_query(out, total / divisor, packed, start, length, kv_head, KV_HEADS, GROUP, HEAD_DIM, BLOCK_D)

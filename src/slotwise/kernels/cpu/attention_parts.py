"""The results of attention over segments of a context, and how they are merged, in the order of positions.

    a result    sums [rows, width], maxima [rows], totals [rows], float32, together

Segments of a row of one tile are left in the step's workspace by the threads that walk them; the last one joins them.
"""

from __future__ import annotations

from slotwise.kernels.cpu.attention_plan import (
    ARRIVALS,
    DIM_PADDED,
    GROUP,
    KV_HEADS,
    PART,
    PARTS,
    SEGMENT_INDEX,
    SEGMENTS,
    TOKENS,
)
from slotwise.kernels.cpu.jit.compiler import kernel
from slotwise.kernels.cpu.simd import FLOAT32, INT32, INT64, exp2, fetch_add, larger, load, store, weighted


@kernel
def merge(rows: int, width: int, sums: int, others: int) -> None:
    """Merge the sums, maxima and totals of a segment, `others`, into those of the segments before it."""
    maxima, their_maxima = sums + rows * width * 4, others + rows * width * 4
    totals, their_totals = maxima + rows * 4, their_maxima + rows * 4
    for row in range(rows):
        before, after = load(maxima, row, FLOAT32), load(their_maxima, row, FLOAT32)
        top = larger(before, after)
        keep, share = exp2(before - top), exp2(after - top)
        store(maxima, row, top, FLOAT32)
        store(totals, row, weighted(load(totals, row, FLOAT32), keep, load(their_totals, row, FLOAT32), share), FLOAT32)
        for i in range(row * width, (row + 1) * width):
            store(sums, i, weighted(load(sums, i, FLOAT32), keep, load(others, i, FLOAT32), share), FLOAT32)


@kernel
def _part(words: int, tile: int, head: int, segment: int) -> int:
    """Address of the sums, maxima and totals of a tile's segment."""
    tokens, kv_heads = load(tile, TOKENS, INT32), load(words, KV_HEADS, INT64)
    token = (load(tile, PART, INT32) + segment * tokens) * kv_heads + head * tokens
    return load(words, PARTS, INT64) + token * load(words, GROUP, INT64) * (load(words, DIM_PADDED, INT64) + 2) * 4


@kernel
def leave_part(words: int, tile: int, head: int, sums: int) -> bool:
    """Store a segment's sums, maxima and totals, which lie together.  Returns whether its row's segments are done."""
    part = _part(words, tile, head, load(tile, SEGMENT_INDEX, INT32))
    rows = load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    for i in range(rows * (load(words, DIM_PADDED, INT64) + 2)):
        store(part, i, load(sums, i, FLOAT32), FLOAT32)
    arrivals = load(words, ARRIVALS, INT64) + (load(tile, PART, INT32) * load(words, KV_HEADS, INT64) + head) * 8
    return fetch_add(arrivals, 1) + 1 == load(tile, SEGMENTS, INT32)


@kernel
def join_parts(words: int, tile: int, head: int, sums: int) -> None:
    """Merge all segments of a row into its sums, maxima and totals, in order."""
    width, rows = load(words, DIM_PADDED, INT64), load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    first = _part(words, tile, head, 0)
    for i in range(rows * (width + 2)):
        store(sums, i, load(first, i, FLOAT32), FLOAT32)
    for segment in range(1, load(tile, SEGMENTS, INT32)):
        merge(rows, width, sums, _part(words, tile, head, segment))

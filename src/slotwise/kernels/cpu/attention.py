"""Attention over the paged cache, decode and prefill alike.

A tile (see `attention_plan.py`) walks the row's blocks once with an online softmax (Milakov and Gimelshein, 2018;
FlashAttention, Dao et al., 2022), so every key and value is read once for the whole group.  Each segment of the context
has a softmax of its own, and their results are merged in order (`attention_parts.py`).  Segments of a row of one tile,
such as a decode row, are separate work, which the last thread to finish merges (Flash-Decoding, Dao et al., 2023);
every other tile walks and merges its segments one by one.

A position's result depends on the positions that it sees and on nothing else, bit for bit: neither on its batch-mates
nor on how many queries its row computes with it.  Strips and segments lie at the same positions for every query, and
one that a query does not see leaves its sums as they are.

Loops count instead of dividing where they can: a tile of a few blocks takes the time of fifty divisions.
Blocks lie anywhere in memory.  Prefetch: values during the score product, the first lines of the next block's keys (or
the next tile's) during the softmax, the others during the value product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from numba import types

from slotwise.kernels.cpu.attention_parts import join_parts, leave_part, merge
from slotwise.kernels.cpu.attention_plan import (
    BLOCK,
    BLOCK_PADDED,
    CACHE,
    CONTEXT_LENS,
    DIM,
    DIM_PADDED,
    FIRST,
    GROUP,
    HEAD_BLOCK,
    KV_HEADS,
    LAST,
    MULTIPLY_ADDRESS,
    OUT,
    QUERY,
    QUERY_STARTS,
    ROW,
    SCALE_BITS,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT,
    SEGMENTS,
    SINKS,
    SOFT_CAP_BITS,
    TABLE,
    TABLE_WIDTH,
    TABLES,
    THREADS,
    TILE_ROWS,
    TILE_WORDS,
    TILES,
    TOKEN,
    TOKENS,
    WINDOW,
)
from slotwise.kernels.cpu.gemm import STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.kernels.cpu.jit.compiler import kernel, specialised
from slotwise.kernels.cpu.jit.intrinsic import INT, KIND, intrinsic
from slotwise.kernels.cpu.launcher import THREAD_COUNTER
from slotwise.kernels.cpu.llvm import LINE, number
from slotwise.kernels.cpu.processor import PAIR
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    LOG2_E,
    ONE,
    PAIRS,
    ZERO,
    Real,
    bytes_of,
    exp2,
    fetch_add,
    fill,
    float32,
    float_of,
    load,
    store,
)
from slotwise.kernels.cpu.softmax import ask_for, ask_for_scales, soft_cap, softmax_strip
from slotwise.kernels.cpu.work_queue import NOTHING, pop, upcoming

ASKED = 16  # lines prefetched while scores become weights: as many as a core can have in flight
NO_SCORE = float32(-1e20)  # below every score
FLOAT_BYTES = 4

bytes_of_factor: Callable[[Real], int] = intrinsic(
    lambda _builder, stored: number(2 if stored == types.int16 else FLOAT_BYTES), KIND, returns=INT)
"""Bytes of a query's element, and of a weight, where the cache is of `stored`."""


@kernel
def _load_queries(words: int, tile: int, head: int, queries: int, kind: Real, stored: Real) -> None:
    """The tile's queries as strips of float32, or of bfloat16 where the cache is multiplied in pairs."""
    group, dim, size = load(words, GROUP, INT64), load(words, DIM, INT64), bytes_of(kind)
    heads, first = group * load(words, KV_HEADS, INT64), load(tile, TOKEN, INT32)
    tokens, target = load(tile, TOKENS, INT32), queries
    for token in range(first, first + tokens):
        source = load(words, QUERY, INT64) + (token * heads + head * group) * dim * size
        for _ in range(group):
            for start in range(0, dim, STRIP):
                strip = target + start * tokens * group * 4
                columns = min(STRIP, dim - start)
                if bytes_of_factor(stored) == FLOAT_BYTES:
                    for i in range(columns):
                        store(strip, i, load(source, start + i, kind), FLOAT32)
                else:
                    for i in range(columns):
                        store(strip, i, load(source, start + i, kind), BFLOAT16)
                    if columns % 2:
                        store(strip, columns, ZERO, BFLOAT16)
            source += dim * size
            target += STRIP_ROW_BYTES


@kernel
def _here(words: int, tile: int) -> int:
    """The position of a tile's first token."""
    row = load(tile, ROW, INT32)
    end = load(load(words, QUERY_STARTS, INT64), row + 1, INT32)
    return load(load(words, CONTEXT_LENS, INT64), row, INT32) - end + load(tile, TOKEN, INT32)


@kernel
def _start_softmax(words: int, tile: int, head: int, place: int, sums: int) -> None:
    """Sums, maxima and totals before the segment that holds `place`: nothing, or sinks.

    The sink of each head is a first score without a value, in the first segment that a query sees.
    """
    group, sinks, width = load(words, GROUP, INT64), load(words, SINKS, INT64), load(words, DIM_PADDED, INT64)
    window, here, rows = load(words, WINDOW, INT64), _here(words, tile), load(tile, TOKENS, INT32) * group
    maxima = sums + rows * width * 4
    totals = maxima + rows * 4
    fill(sums, rows * width, ZERO)
    fill(maxima, rows, NO_SCORE)
    fill(totals, rows, ZERO)
    if sinks != 0:
        for row in range(rows):
            first = max(0, here + row // group - window + 1) if window > 0 else 0
            if first // SEGMENT == place // SEGMENT:
                store(maxima, row, load(sinks, head * group + row % group, FLOAT32) * LOG2_E, FLOAT32)
                store(totals, row, ONE, FLOAT32)


@kernel
def _softmax(
    words: int, tile: int, scores: int, sums: int, state: int, low: int, high: int, base: int, scales: int, stored: Real
) -> None:
    """Scores of places `base + low ... base + high` to weights; the sums so far are rescaled to the new maximum.

    `scales` are those of place `base`, where the `stored` type has any.
    """
    columns = load(words, BLOCK_PADDED, INT64)
    group, width = load(words, GROUP, INT64), load(words, DIM_PADDED, INT64)
    tokens, window, here = load(tile, TOKENS, INT32), load(words, WINDOW, INT64), _here(words, tile) - base
    cap, scale = load(words, SOFT_CAP_BITS, INT64), float_of(load(words, SCALE_BITS, INT64))
    factor = scale if cap == 0 else ONE
    row = 0
    for _ in range(tokens):
        end = min(high, here + 1)  # the query's own place, as a column, is the last it sees
        start = max(low, here - window + 1) if window > 0 else low
        for _ in range(group):
            if cap != 0:
                soft_cap(scores, scale, float_of(cap))
            before = load(state, row, FLOAT32)
            top, added = softmax_strip(scores, start, end, before, factor, scales, columns, stored)
            keep = exp2(before - top)
            store(state, row, top, FLOAT32)
            store(state, tokens * group + row, load(state, tokens * group + row, FLOAT32) * keep + added, FLOAT32)
            if keep != ONE:
                for i in range(width):
                    store(sums, i, load(sums, i, FLOAT32) * keep, FLOAT32)
            row += 1
            scores += STRIP_ROW_BYTES
            sums += width * 4
        here += 1


@kernel
def _add_values(
    words: int, tile: int, weights: int, sums: int, values: int, place: int, places: int, ahead: int, stored: Real
) -> None:
    """Add the weighted values of `places` places from `place` on.

    Not one of them is read for a query that does not see it: a draft's values may not be finite, and weights of 0 do
    not hide that from the queries before it.
    """
    multiply, width, size = load(words, MULTIPLY_ADDRESS, INT64), load(words, DIM_PADDED, INT64), bytes_of(stored)
    rows, here = load(words, GROUP, INT64), _here(words, tile)
    tokens, seen = load(tile, TOKENS, INT32), here - place + 1
    if seen >= places:  # by the first token, and so by all
        rows, tokens = rows * tokens, 1
    for _ in range(tokens):
        if seen > 0:
            call_multiply(multiply, rows, width, weights, 0, values, width * size, PAIR * size, min(seen, places), sums,
                          width * 4, ahead)
        weights += rows * STRIP_ROW_BYTES
        sums += rows * width * 4
        seen += 1


@kernel
def _keys(words: int, tile: int, head: int, entry: int) -> int:
    """Address of the `entry`th block of a tile's row."""
    table = load(words, TABLES, INT64) + load(tile, ROW, INT32) * load(words, TABLE_WIDTH, INT64) * 4
    block = load(table, entry, INT32) * load(words, KV_HEADS, INT64) + head
    return load(words, CACHE, INT64) + block * load(words, HEAD_BLOCK, INT64)


@kernel
def _walk(
    words: int, tile: int, head: int, place: int, last: int, queries: int, scores: int, sums: int, next_keys: int,
    stored: Real,
) -> None:
    """Add the weighted values of places `place ... last` of a tile, block by block; `next_keys` is read after them."""
    block, block_padded = load(words, BLOCK, INT64), load(words, BLOCK_PADDED, INT64)
    dim, width, size = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), bytes_of(stored)
    multiply = load(words, MULTIPLY_ADDRESS, INT64)
    rows = load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    state = sums + rows * width * 4
    entry, offset = place // block, place % block
    keys = _keys(words, tile, head, entry)
    while place < last:
        start = offset // STRIP * STRIP
        low = offset - start
        high = min(min(block - start, STRIP), low + last - place)
        following = keys
        offset += high - low
        if place + high - low >= last:
            following = next_keys
        elif offset == block:
            entry, offset = entry + 1, 0
            following = _keys(words, tile, head, entry)
        values = keys + (dim * block_padded + (start + low) * width) * size
        column = low // PAIR * PAIR
        columns = min(block_padded - start, (high + PAIR - 1) // PAIR * PAIR) - column
        read = keys + (start + column) * size
        scales = keys + (dim * block_padded + block * width) * size + start * 4
        ask_for_scales(scales, block_padded, stored)
        fill(scores, rows * STRIP, ZERO)
        call_multiply(multiply, rows, columns, queries, rows * STRIP_ROW_BYTES, read, block_padded * size, PAIR * size,
                      dim, scores + column * 4, STRIP_ROW_BYTES, values - read)
        for line in range(following, following + ASKED * LINE, LINE):
            ask_for(line)
        _softmax(words, tile, scores, sums, state, low, high, place - low, scales, stored)
        # Pairs begin at even columns for all queries, or sums would depend on where the tile begins.
        back = low % (FLOAT_BYTES // bytes_of_factor(stored))
        _add_values(words, tile, scores + (low - back) * bytes_of_factor(stored), sums, values - back * width * size,
                    place - back, high - low + back, following - values, stored)
        keys = following
        place += high - low


@kernel
def _store_outputs(words: int, tile: int, head: int, sums: int, totals: int, kind: Real) -> None:
    """Store the weighted sums over their totals to the output."""
    group, dim, width = load(words, GROUP, INT64), load(words, DIM, INT64), load(words, DIM_PADDED, INT64)
    heads, first = group * load(words, KV_HEADS, INT64), load(tile, TOKEN, INT32)
    row = 0
    for token in range(first, first + load(tile, TOKENS, INT32)):
        target = load(words, OUT, INT64) + (token * heads + head * group) * dim * bytes_of(kind)
        for _ in range(group):
            factor = ONE / load(totals, row, FLOAT32)
            for i in range(dim):
                store(target, i, load(sums, row * width + i, FLOAT32) * factor, kind)
            target += dim * bytes_of(kind)
            row += 1


@kernel
def _walk_segments(
    words: int, tile: int, head: int, queries: int, scores: int, sums: int, next_keys: int, stored: Real
) -> None:
    """Sums, maxima and totals of all places of a tile; those of each segment but the first lie behind them first."""
    width, rows = load(words, DIM_PADDED, INT64), load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    place, last, block = load(tile, FIRST, INT32), load(tile, LAST, INT32), load(words, BLOCK, INT64)
    others = sums + rows * (width + 2) * 4
    into = sums
    while place < last:
        end = min(last, (place // SEGMENT + 1) * SEGMENT)
        following = next_keys if end == last else _keys(words, tile, head, end // block)
        _start_softmax(words, tile, head, place, into)
        _walk(words, tile, head, place, end, queries, scores, into, following, stored)
        if into != sums:
            merge(rows, width, sums, others)
        into = others
        place = end


@kernel
def _tile(words: int, item: int) -> int:
    """The tile of an item; an item is one head of a tile."""
    return load(words, TILES, INT64) + TABLE + item // load(words, KV_HEADS, INT64) * TILE_WORDS * 4


@kernel
def _first_keys(words: int, item: int) -> int:
    """Address of the first keys an item reads."""
    tile = _tile(words, item)
    entry = load(tile, FIRST, INT32) // load(words, BLOCK, INT64)
    return _keys(words, tile, item % load(words, KV_HEADS, INT64), entry)


@kernel
def _attend(words: int, kind: Real, stored: Real) -> None:
    kv_heads, width = load(words, KV_HEADS, INT64), load(words, DIM_PADDED, INT64)
    group, threads = load(words, GROUP, INT64), load(words, THREADS, INT64)
    most = max(1, TILE_ROWS // group) * group
    thread = fetch_add(words + THREAD_COUNTER, 1)
    queries = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    scores = queries + most * ((width + STRIP - 1) // STRIP) * STRIP_ROW_BYTES
    sums = scores + most * STRIP_ROW_BYTES
    items = load(load(words, TILES, INT64), 0, INT64) * kv_heads
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        tile, head = _tile(words, item), item % kv_heads
        after = upcoming(words, thread, threads, items)
        next_keys = _first_keys(words, item if after == NOTHING else after)
        totals = sums + load(tile, TOKENS, INT32) * group * (width + 1) * 4
        _load_queries(words, tile, head, queries, kind, stored)
        _walk_segments(words, tile, head, queries, scores, sums, next_keys, stored)
        if load(tile, SEGMENTS, INT32) == 1:
            _store_outputs(words, tile, head, sums, totals, kind)
        elif leave_part(words, tile, head, sums):
            join_parts(words, tile, head, sums)
            _store_outputs(words, tile, head, sums, totals, kind)
        item = pop(words, thread, threads, items)


ATTEND = {  # by the type of the queries and of the cache
    (dtype, cached): specialised(_attend, kind, stored)
    for dtype, kind in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32))
    for cached, stored in ((dtype, kind), (torch.int8, INT8))}

ATTEND_PAIRS = specialised(_attend, BFLOAT16, PAIRS)
"""The same of bfloat16, multiplied in pairs."""

"""Attention over the paged cache, decode and prefill alike.

A row's queries are cut into tiles of a few tokens times all query heads of one key-value head.  A tile walks the row's
blocks once with an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022), so every key and
value is read once for the whole group.  A decode row is a tile of one token; its context is cut into segments, whose
partial results the last thread to finish combines (Flash-Decoding, Dao et al., 2023).  Where the cuts fall depends on
the row alone, so its result does not depend on its batch-mates, bit for bit.

Loops count instead of dividing where they can: a tile of a few blocks takes the time of fifty divisions.
Blocks lie anywhere in memory.  Prefetch: values during the score product, the first lines of the next block's keys (or
the next tile's) during the softmax, the others during the value product.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from slotwise.kernels.cpu.cache import padded
from slotwise.kernels.cpu.gemm import STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.kernels.cpu.jit.compiler import Compiled, kernel, specialised
from slotwise.kernels.cpu.launcher import HEADER, THREAD_COUNTER
from slotwise.kernels.cpu.llvm import LINE
from slotwise.kernels.cpu.processor import PAIR
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    LOG2_E,
    ONE,
    ZERO,
    Real,
    bytes_of,
    exp2,
    fetch_add,
    fill,
    float32,
    float_of,
    larger,
    load,
    store,
)
from slotwise.kernels.cpu.softmax import ask_for, ask_for_scales, soft_cap, softmax_strip
from slotwise.kernels.cpu.work_queue import NOTHING, pop, upcoming
from slotwise.kernels.interface import AttentionShape

ASKED = 16  # lines prefetched while scores become weights: as many as a core can have in flight
NO_SCORE = float32(-1e20)  # below every score
TILE_ROWS = 48  # the most queries (tokens x heads) of a tile: its scores stay in the first-level cache
SEGMENT = 1024  # tokens of context per segment of a decode row: another core's results are slow to come by

# A tile: `TILE_WORDS` int32 in a table.
ROW, TOKEN, TOKENS, FIRST, LAST, SEGMENT_INDEX, SEGMENTS, PART = range(8)
TILE_WORDS = 8
TABLE = 64  # bytes before the table: a cache line for the number of tiles

# Arguments of `_plan` and of `_attend`, in words after the header.
(
    MULTIPLY_ADDRESS, QUERY, OUT, CACHE, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, TILES, ARRIVALS, PARTS,
    SCRATCH, SCRATCH_BYTES, GROUP, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED, HEAD_BLOCK, WINDOW, SCALE_BITS,
    THREADS, SOFT_CAP_BITS, SINKS,
) = range(HEADER, HEADER + 26)


class Workspace(NamedTuple):
    """Offsets in bytes of the parts of a step's workspace, behind the number of tiles and their table."""

    arrivals: int
    parts: int
    threads: int
    thread_bytes: int

    def floats(self, threads: int) -> int:
        """Size of the workspace in float32 words."""
        return (self.threads + threads * self.thread_bytes) // 4


@functools.lru_cache(maxsize=256)
def workspace(shape: AttentionShape, rows: int, tokens: int, max_context_len: int) -> Workspace:
    """The largest workspace that a step of this size may need."""
    group, width = shape.num_heads // shape.num_kv_heads, padded(shape.head_dim)
    per_tile = max(1, TILE_ROWS // group)
    segments = rows * (max_context_len // SEGMENT + 1)
    arrivals = TABLE + 4 * TILE_WORDS * (segments + rows + tokens // per_tile)
    parts = arrivals + 8 * segments * shape.num_kv_heads
    threads = parts + 4 * segments * shape.num_heads * (width + 2)
    strips = -(-width // STRIP)
    return Workspace(arrivals, parts, threads, 4 * per_tile * group * ((strips + 1) * STRIP + width + 2))


def _plan(words: int) -> None:
    """Cut the step's rows into tiles."""
    starts, contexts = load(words, QUERY_STARTS, INT64), load(words, CONTEXT_LENS, INT64)
    tile, arrivals = load(words, TILES, INT64) + TABLE, load(words, ARRIVALS, INT64)
    kv_heads, window = load(words, KV_HEADS, INT64), load(words, WINDOW, INT64)
    per_tile = max(1, TILE_ROWS // load(words, GROUP, INT64))
    count, parts = 0, 0
    for row in range(load(words, ROWS, INT64)):
        token, end = load(starts, row, INT32), load(starts, row + 1, INT32)
        is_decode = end - token == 1
        while token < end:
            tokens = min(per_tile, end - token)
            position = load(contexts, row, INT32) - (end - token)
            first = max(0, position - window + 1) if window > 0 else 0
            last = position + tokens
            step = SEGMENT if is_decode else last - first
            segments = (last - first + step - 1) // step
            for segment in range(segments):
                store(tile, ROW, row, INT32)
                store(tile, TOKEN, token, INT32)
                store(tile, TOKENS, tokens, INT32)
                store(tile, FIRST, first + segment * step, INT32)
                store(tile, LAST, min(last, first + (segment + 1) * step), INT32)
                store(tile, SEGMENT_INDEX, segment, INT32)
                store(tile, SEGMENTS, segments, INT32)
                store(tile, PART, parts, INT32)
                tile += TILE_WORDS * 4
            count += segments
            if segments > 1:
                for head in range(kv_heads):
                    store(arrivals, parts * kv_heads + head, 0, INT64)
                parts += segments
            token += tokens
    store(load(words, TILES, INT64), 0, count, INT64)


@kernel
def _load_queries(words: int, tile: int, head: int, queries: int, kind: Real) -> None:
    """The tile's queries as strips of float32, scaled so that the softmax can use powers of two."""
    group, dim, size = load(words, GROUP, INT64), load(words, DIM, INT64), bytes_of(kind)
    heads, first = group * load(words, KV_HEADS, INT64), load(tile, TOKEN, INT32)
    tokens, scale = load(tile, TOKENS, INT32), float_of(load(words, SCALE_BITS, INT64))
    target = queries
    for token in range(first, first + tokens):
        source = load(words, QUERY, INT64) + (token * heads + head * group) * dim * size
        for _ in range(group):
            for start in range(0, dim, STRIP):
                strip = target + start * tokens * group * 4
                for i in range(min(STRIP, dim - start)):
                    store(strip, i, load(source, start + i, kind) * scale, FLOAT32)
            source += dim * size
            target += STRIP_ROW_BYTES


@kernel
def _start_softmax(words: int, tile: int, head: int, maxima: int, totals: int) -> None:
    """Maxima and totals before any place: nothing, or the sink of each head, a first score without a value.

    Of a row in segments, the first has the sinks.
    """
    group, sinks = load(words, GROUP, INT64), load(words, SINKS, INT64)
    rows = load(tile, TOKENS, INT32) * group
    fill(maxima, rows, NO_SCORE)
    fill(totals, rows, ZERO)
    if sinks != 0 and load(tile, SEGMENT_INDEX, INT32) == 0:
        for row in range(rows):
            store(maxima, row, load(sinks, head * group + row % group, FLOAT32) * LOG2_E, FLOAT32)
        fill(totals, rows, ONE)


@kernel
def _softmax(
    words: int, tile: int, scores: int, sums: int, state: int, low: int, high: int, base: int, scales: int, stored: Real
) -> None:
    """Scores of places `base + low ... base + high` to weights; the sums so far are rescaled to the new maximum.

    `scales` are those of place `base`, where the `stored` type has any.
    """
    columns = load(words, BLOCK_PADDED, INT64)
    group, width = load(words, GROUP, INT64), load(words, DIM_PADDED, INT64)
    tokens, window, row_in_step = load(tile, TOKENS, INT32), load(words, WINDOW, INT64), load(tile, ROW, INT32)
    end_token = load(load(words, QUERY_STARTS, INT64), row_in_step + 1, INT32)
    here = load(load(words, CONTEXT_LENS, INT64), row_in_step, INT32) - end_token + load(tile, TOKEN, INT32) - base
    cap = load(words, SOFT_CAP_BITS, INT64)
    row = 0
    for _ in range(tokens):
        end = min(high, here + 1)  # the query's own place, as a column, is the last it sees
        start = max(low, here - window + 1) if window > 0 else low
        for _ in range(group):
            if cap != 0:
                soft_cap(scores, high, float_of(cap))
            before = load(state, row, FLOAT32)
            top, added = softmax_strip(scores, start, end, before, scales, columns, stored)
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
def _keys(words: int, tile: int, head: int, entry: int) -> int:
    """Address of the `entry`th block of a tile's row."""
    table = load(words, TABLES, INT64) + load(tile, ROW, INT32) * load(words, TABLE_WIDTH, INT64) * 4
    block = load(table, entry, INT32) * load(words, KV_HEADS, INT64) + head
    return load(words, CACHE, INT64) + block * load(words, HEAD_BLOCK, INT64)


@kernel
def _walk(
    words: int, tile: int, head: int, queries: int, scores: int, sums: int, state: int, next_keys: int, stored: Real
) -> None:
    """Add the weighted values of all places of a tile, block by block; `next_keys` is read after them."""
    block, block_padded = load(words, BLOCK, INT64), load(words, BLOCK_PADDED, INT64)
    dim, width, size = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), bytes_of(stored)
    multiply = load(words, MULTIPLY_ADDRESS, INT64)
    rows = load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    place, last = load(tile, FIRST, INT32), load(tile, LAST, INT32)
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
        call_multiply(multiply, rows, width, scores + low * 4, 0, values, width * size, PAIR * size, high - low, sums,
                      width * 4, following - values)
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
def _leave_part(words: int, tile: int, head: int, sums: int) -> bool:
    """Store a segment's sums, maxima and totals, which lie together.  Returns whether its row's segments are done."""
    kv_heads, width = load(words, KV_HEADS, INT64), load(words, DIM_PADDED, INT64)
    floats = load(words, GROUP, INT64) * (width + 2)
    place = load(tile, PART, INT32) + load(tile, SEGMENT_INDEX, INT32)
    part = load(words, PARTS, INT64) + (place * kv_heads + head) * floats * 4
    for i in range(floats):
        store(part, i, load(sums, i, FLOAT32), FLOAT32)
    arrivals = load(words, ARRIVALS, INT64) + (load(tile, PART, INT32) * kv_heads + head) * 8
    return fetch_add(arrivals, 1) + 1 == load(tile, SEGMENTS, INT32)


@kernel
def _join_parts(words: int, tile: int, head: int, sums: int, totals: int) -> None:
    """Combine all segments of a row into its sums and totals, in order."""
    kv_heads, width = load(words, KV_HEADS, INT64), load(words, DIM_PADDED, INT64)
    group = load(words, GROUP, INT64)
    stride = kv_heads * group * (width + 2) * 4
    first = load(words, PARTS, INT64) + load(tile, PART, INT32) * stride + head * group * (width + 2) * 4
    end = first + load(tile, SEGMENTS, INT32) * stride
    for row in range(group):
        top = NO_SCORE
        for part in range(first, end, stride):
            top = larger(top, load(part, group * width + row, FLOAT32))
        total = ZERO
        fill(sums + row * width * 4, width, ZERO)
        for part in range(first, end, stride):
            share = exp2(load(part, group * width + row, FLOAT32) - top)
            total += share * load(part, group * (width + 1) + row, FLOAT32)
            for i in range(row * width, (row + 1) * width):
                store(sums, i, load(sums, i, FLOAT32) + share * load(part, i, FLOAT32), FLOAT32)
        store(totals, row, total, FLOAT32)


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
        rows = load(tile, TOKENS, INT32) * group
        maxima = sums + rows * width * 4
        totals = maxima + rows * 4
        fill(sums, rows * width, ZERO)
        _start_softmax(words, tile, head, maxima, totals)
        _load_queries(words, tile, head, queries, kind)
        _walk(words, tile, head, queries, scores, sums, maxima, next_keys, stored)
        if load(tile, SEGMENTS, INT32) == 1:
            _store_outputs(words, tile, head, sums, totals, kind)
        elif _leave_part(words, tile, head, sums):
            _join_parts(words, tile, head, sums, totals)
            _store_outputs(words, tile, head, sums, totals, kind)
        item = pop(words, thread, threads, items)


PLAN = Compiled(_plan)
ATTEND = {  # by the type of the queries and of the cache
    (dtype, cached): specialised(_attend, kind, stored)
    for dtype, kind in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32))
    for cached, stored in ((dtype, kind), (torch.int8, INT8))}

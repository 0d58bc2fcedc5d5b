"""Attention over the paged cache, decode and prefill alike.

A row's queries are cut into tiles of a few tokens times all query heads of one key-value head.  A tile walks the row's
blocks once with an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022), so every key and
value is read once for the whole group.  A decode row is a tile of one token; its context is cut into segments whose
parts the last thread to finish joins (Flash-Decoding, Dao et al., 2023).  Where the cuts fall depends on the row alone,
so its result does not depend on its batch-mates, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.openmp import HEADER, MAX_ARGUMENTS
from slotwise.kernels.cpu.simd import (
    BFLOAT16,
    FASTMATH,
    FLOAT32,
    INT32,
    INT64,
    array,
    bits_to_float,
    bytes_of,
    exp2,
    fetch_add,
    narrow,
    widen,
)
from slotwise.kernels.cpu.tile import LANES, STRIP, STRIP_ROW_BYTES, call_multiply

TILE_ROWS = 48  # as many queries (tokens x heads) as a tile may hold: its scores stay in the nearest processor cache
SEGMENT = 256  # tokens of context one thread takes of a decode row
NO_SCORE = np.float32(-1e20)  # below every score

# What a tile is: `TILE_WORDS` int32 in a table.
ROW, TOKEN, TOKENS, FIRST, LAST, SEGMENT_INDEX, SEGMENTS, PART = range(8)
TILE_WORDS = 8

# Arguments of `plan` and of `attend`, in words after the header.
(
    MULTIPLY_ADDRESS, QUERY, OUT, CACHE, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, TILES, PARTS, ARRIVALS,
    SCRATCH, SCRATCH_BYTES, HEADS, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED, WINDOW, SCALE_BITS, NUM_TILES,
) = range(HEADER, HEADER + 23)


def tile_tokens(group: int) -> int:
    """Tokens of a tile for `group` query heads a key-value head."""
    return max(1, TILE_ROWS // group)


def scratch_floats(group: int, head_dim_padded: int) -> int:
    """float32 words one thread works in: queries, scores, outputs, maxima, sums."""
    rows = tile_tokens(group) * group
    strips = -(-head_dim_padded // STRIP)
    return rows * (strips * STRIP + STRIP + head_dim_padded + 2)


def part_floats(group: int, head_dim_padded: int) -> int:
    """float32 words of a segment's part for one key-value head."""
    return group * (head_dim_padded + 2)


def _plan(words_at):
    """Cut the step's rows into tiles; their number goes to `NUM_TILES`."""
    words = array(words_at, HEADER + MAX_ARGUMENTS, INT64)
    starts = array(words[QUERY_STARTS], words[ROWS] + 1, INT32)
    contexts = array(words[CONTEXT_LENS], words[ROWS], INT32)
    tiles = array(words[TILES], 1, INT32)
    arrivals = array(words[ARRIVALS], 1, INT64)
    per_tile = max(1, TILE_ROWS // (words[HEADS] // words[KV_HEADS]))
    count = parts = 0
    for row in range(words[ROWS]):
        end = np.int64(starts[row + 1])
        is_decode = end - starts[row] == 1
        for token in range(starts[row], end, per_tile):
            tokens = min(per_tile, end - token)
            position = contexts[row] - (end - token)
            first = max(0, position - words[WINDOW] + 1) if words[WINDOW] > 0 else 0
            last = position + tokens
            step = SEGMENT if is_decode else last - first
            segments = (last - first + step - 1) // step
            for segment in range(segments):
                tile = count * TILE_WORDS
                tiles[tile + ROW] = row
                tiles[tile + TOKEN] = token
                tiles[tile + TOKENS] = tokens
                tiles[tile + FIRST] = first + segment * step
                tiles[tile + LAST] = min(last, first + (segment + 1) * step)
                tiles[tile + SEGMENT_INDEX] = segment
                tiles[tile + SEGMENTS] = segments
                tiles[tile + PART] = parts
                count += 1
            if segments > 1:
                for head in range(words[KV_HEADS]):
                    arrivals[parts * words[KV_HEADS] + head] = 0
                parts += segments
    words[NUM_TILES] = count


@njit(fastmath=FASTMATH)
def _load_queries(words, tile, head, queries, kind):
    """The tile's queries as strips of float32, scaled so that the softmax can work with powers of two."""
    heads, dim = words[HEADS], words[DIM]
    group = heads // words[KV_HEADS]
    rows = tile[TOKENS] * group
    scale = bits_to_float(np.uint32(words[SCALE_BITS]))
    for row in range(rows):
        token, member = row // group, row % group
        source_at = ((tile[TOKEN] + token) * heads + head * group + member) * dim
        source = array(words[QUERY] + source_at * bytes_of(kind), dim, kind)
        for start in range(0, dim, STRIP):
            target = array(queries + (start * rows + row * STRIP) * 4, STRIP, FLOAT32)
            for i in range(min(STRIP, dim - start)):
                target[i] = widen(source[start + i]) * scale


@njit(fastmath=FASTMATH)
def _softmax_row(scores, low, high, maximum, total):
    """Turn scores `[low, high)` into weights against the running maximum: new maximum, total, and what to scale by."""
    top = scores[low]
    for i in range(low, high):
        top = max(top, scores[i])
    top = max(top, maximum)
    added = np.float32(0)
    for i in range(low, high):
        weight = exp2(scores[i] - top)
        scores[i] = weight
        added += weight
    keep = exp2(maximum - top)
    return top, total * keep + added, keep


@njit(fastmath=FASTMATH)
def _softmax(words, tile, scores_at, sums_at, state_at, low, high, base):
    """Scores of places `base + low ... base + high` to weights; what the sums held so far is scaled to match."""
    group, width = words[HEADS] // words[KV_HEADS], words[DIM_PADDED]
    rows = tile[TOKENS] * group
    starts = array(words[QUERY_STARTS], words[ROWS] + 1, INT32)
    contexts = array(words[CONTEXT_LENS], words[ROWS], INT32)
    position = contexts[tile[ROW]] - starts[tile[ROW] + 1] + tile[TOKEN] - base  # of the first token, as a column
    state = array(state_at, 2 * rows, FLOAT32)
    for row in range(rows):
        scores = array(scores_at + row * STRIP_ROW_BYTES, STRIP, FLOAT32)
        here = position + row // group
        end = max(low, min(high, here + 1))
        start = min(end, max(low, here - words[WINDOW] + 1)) if words[WINDOW] > 0 else low
        for i in range(low, start):
            scores[i] = 0
        for i in range(end, high):
            scores[i] = 0
        if start < end:
            maximum, total, keep = _softmax_row(scores, start, end, state[row], state[rows + row])
            state[row] = maximum
            state[rows + row] = total
            if keep != np.float32(1):
                sums = array(sums_at + row * width * 4, width, FLOAT32)
                for i in range(width):
                    sums[i] *= keep


@njit(fastmath=FASTMATH)
def _walk(words, tile, head, queries, scores, sums, state, kind):
    """Add the values of all places of a tile, weighted, block by block."""
    size, block, block_padded, dim = bytes_of(kind), words[BLOCK], words[BLOCK_PADDED], words[DIM]
    width = words[DIM_PADDED]
    rows = tile[TOKENS] * (words[HEADS] // words[KV_HEADS])
    table = array(words[TABLES] + tile[ROW] * words[TABLE_WIDTH] * 4, words[TABLE_WIDTH], INT32)
    head_block = dim * block_padded + block * width
    zero = array(scores, rows * STRIP, FLOAT32)
    place = np.int64(tile[FIRST])
    while place < tile[LAST]:
        offset = place % block
        start = offset // STRIP * STRIP
        low = offset - start
        high = min(min(block - start, STRIP), low + tile[LAST] - place)
        keys = words[CACHE] + (table[place // block] * words[KV_HEADS] + head) * head_block * size
        values = keys + (dim * block_padded + (start + low) * width) * size
        column = low // LANES * LANES
        columns = (high - column + LANES - 1) // LANES * LANES
        zero[:] = 0
        call_multiply(words[MULTIPLY_ADDRESS], rows, columns, queries, rows * STRIP_ROW_BYTES,
                      keys + (start + column) * size, block_padded * size, dim, scores + column * 4, STRIP_ROW_BYTES)
        _softmax(words, tile, scores, sums, state, low, high, place - low)
        call_multiply(words[MULTIPLY_ADDRESS], rows, width, scores + low * 4, 0,
                      values, width * size, high - low, sums, width * 4)
        place += high - low


@njit(fastmath=FASTMATH)
def _store(words, tile, head, sums_at, totals_at, kind):
    """Weighted sums over their totals, to the output."""
    heads, dim, width = words[HEADS], words[DIM], words[DIM_PADDED]
    group = heads // words[KV_HEADS]
    rows = tile[TOKENS] * group
    totals = array(totals_at, rows, FLOAT32)
    for row in range(rows):
        target_at = ((tile[TOKEN] + row // group) * heads + head * group + row % group) * dim
        target = array(words[OUT] + target_at * bytes_of(kind), dim, kind)
        sums = array(sums_at + row * width * 4, width, FLOAT32)
        factor = np.float32(1) / totals[row]
        for i in range(dim):
            target[i] = narrow(sums[i] * factor, kind)


@njit(fastmath=FASTMATH)
def _join(words, tile, head, sums_at, state_at, kind):
    """Leave a segment's part; whoever leaves the last one of a row joins them, in order, and stores the result."""
    group, kv_heads, width = words[HEADS] // words[KV_HEADS], words[KV_HEADS], words[DIM_PADDED]
    part_bytes = group * (width + 2) * 4
    first = words[PARTS] + (tile[PART] * kv_heads + head) * part_bytes
    stride = kv_heads * part_bytes
    mine = array(first + tile[SEGMENT_INDEX] * stride, group * (width + 2), FLOAT32)
    sums = array(sums_at, group * width, FLOAT32)
    state = array(state_at, 2 * group, FLOAT32)
    mine[: group * width] = sums
    mine[group * width :] = state
    if fetch_add(words[ARRIVALS] + (tile[PART] * kv_heads + head) * 8, 1) + 1 < tile[SEGMENTS]:
        return
    for row in range(group):
        top = NO_SCORE
        for segment in range(tile[SEGMENTS]):
            part = array(first + segment * stride, group * (width + 2), FLOAT32)
            top = max(top, part[group * width + row])
        total = np.float32(0)
        for i in range(width):
            sums[row * width + i] = 0
        for segment in range(tile[SEGMENTS]):
            part = array(first + segment * stride, group * (width + 2), FLOAT32)
            share = exp2(part[group * width + row] - top)
            total += share * part[group * (width + 1) + row]
            for i in range(width):
                sums[row * width + i] += share * part[row * width + i]
        state[group + row] = total
    _store(words, tile, head, sums_at, state_at + group * 4, kind)


@njit(fastmath=FASTMATH)
def _attend(words_at, kind):
    words = array(words_at, HEADER + MAX_ARGUMENTS, INT64)
    kv_heads, width = words[KV_HEADS], words[DIM_PADDED]
    group = words[HEADS] // kv_heads
    most = max(1, TILE_ROWS // group) * group
    queries = words[SCRATCH] + fetch_add(words_at + 64, 1) * words[SCRATCH_BYTES]
    scores = queries + most * ((width + STRIP - 1) // STRIP) * STRIP_ROW_BYTES
    sums = scores + most * STRIP_ROW_BYTES
    state_at = sums + most * width * 4
    item = fetch_add(words_at, 1)
    while item < words[NUM_TILES] * kv_heads:
        tile = array(words[TILES] + item // kv_heads * TILE_WORDS * 4, TILE_WORDS, INT32)
        head = item % kv_heads
        rows = tile[TOKENS] * group
        array(sums, rows * width, FLOAT32)[:] = 0
        state = array(state_at, 2 * rows, FLOAT32)
        state[:rows] = NO_SCORE
        state[rows:] = 0
        _load_queries(words, tile, head, queries, kind)
        _walk(words, tile, head, queries, scores, sums, state_at, kind)
        if tile[SEGMENTS] == 1:
            _store(words, tile, head, sums, state_at + rows * 4, kind)
        else:
            _join(words, tile, head, sums, state_at, kind)
        item = fetch_add(words_at, 1)


def _attend_bfloat16(words_at):
    _attend(words_at, BFLOAT16)


def _attend_float32(words_at):
    _attend(words_at, FLOAT32)


PLAN = Compiled(_plan, "void(int64)")
ATTEND = {
    torch.bfloat16: Compiled(_attend_bfloat16, "void(int64)"),
    torch.float32: Compiled(_attend_float32, "void(int64)"),
}

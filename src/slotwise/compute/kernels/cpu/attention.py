"""Attention over the paged cache, decode and prefill alike.

A tile is a few tokens of a row, for all query heads of one key-value head.  It walks the row's blocks once with an
online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022), so every key and value is read once for
the whole group of heads.  In steps of many rows of one token a thread walks all key-value heads of a row together: in
a block these lie one after the other, and memory is read fastest in order.

The context is cut into segments by absolute position, whatever the row and the window.  Each segment has a softmax of
its own, and their results are merged in order.  Segments of a row of one tile, such as a decode row, are separate work
for several threads, which the last thread to finish merges (Flash-Decoding, Dao et al., 2023); every other tile walks
and merges its segments one by one.

    segments    0 ... 1023 | 1024 ... 2047 | 2048 ...

A position's result depends on the positions that it sees and on nothing else, bit for bit: neither on its batch-mates
nor on how many queries its row computes with it.  Strips and segments lie at the same positions for every query, and
one that a query does not see leaves its sums as they are.

Loops count instead of dividing where they can: a tile of a few blocks takes the time of fifty divisions.  Blocks lie
anywhere in memory, so each is prefetched while the one before it, often another tile's, is computed: its keys during
the score product, its values during the softmax and the value product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from llvmlite import ir
from numba import types

from slotwise.compute.kernels.cpu.cache import padded
from slotwise.compute.kernels.cpu.jit import llvm
from slotwise.compute.kernels.cpu.jit.compiler import (
    FLOAT,
    INT,
    KIND,
    CompiledKernel,
    ElementType,
    intrinsic,
    kernel,
    specialized,
)
from slotwise.compute.kernels.cpu.jit.llvm import (
    BRAIN,
    LINE,
    LOWEST,
    SHORT,
    SINGLE,
    WORD,
    all_of,
    behind,
    call,
    fast,
    number,
    pointer,
    polynomial,
    prefetch,
    spread,
    write,
)
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER
from slotwise.compute.kernels.cpu.processor import AVX512, LANES, PAIR
from slotwise.compute.kernels.cpu.products.gemm import STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.compute.kernels.cpu.simd import (
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
    larger,
    load,
    prefetch_soon,
    store,
    tanh,
    weighted,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop, upcoming
from slotwise.compute.kernels.interface import AttentionShape

# The softmax over one strip of scores, in registers.
#
# Loops over a part of a strip would be split into whole vectors and a remainder, twice for every row of every block.
# Here a strip is always whole vectors, four of 16 lanes, and a mask selects the columns that count.  Scales of an int8
# cache (`cache.py`) are applied here: a key's multiplies its score, a value's the weight it gets.

# The score of a column that does not count: so far below every maximum that its weight is 0.
UNSEEN = -3e38

_VECTOR, _WIDE = ir.VectorType(SINGLE, LANES), ir.VectorType(WORD, LANES)


def _reduced(
    builder: ir.IRBuilder, name: str, vectors: list[ir.Value], pairwise: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Reduce a strip's vectors, a power of two of them, to one number."""
    while len(vectors) > 1:
        vectors = [pairwise(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    first = [ir.Constant(SINGLE, 0.0)] if name == "fadd" else []
    return fast(builder, f"llvm.vector.reduce.{name}.v{LANES}f32", SINGLE, *first, *vectors)


def _places(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """Pointers to a strip's vectors."""
    return [pointer(builder, behind(builder, address, 4 * LANES * v), _VECTOR) for v in range(STRIP // LANES)]


def _scaled(
    builder: ir.IRBuilder, vectors: list[ir.Value], counted: list[ir.Value], scales: ir.Value
) -> list[ir.Value]:
    """Vectors times the scales of the columns that count; other scales are not read: they may lie outside the cache."""
    results = []
    for vector, counts, place in zip(vectors, counted, _places(builder, scales), strict=True):
        loaded = call(builder, f"llvm.masked.load.v{LANES}f32.p0", _VECTOR, place, ir.Constant(WORD, 4), counts,
                      all_of(_VECTOR, 0.0))
        results.append(builder.fmul(vector, loaded))
    return results


def _of_values(builder: ir.IRBuilder, scales: ir.Value, tokens: ir.Value) -> ir.Value:
    """Address of the scales of a strip's values, `tokens` columns behind those of its keys."""
    return builder.add(scales, builder.shl(tokens, number(2)))


def _prefetch_scales(builder: ir.IRBuilder, scales: ir.Value, tokens: ir.Value, kind: ElementType) -> None:
    if kind == types.int8:
        for address in (scales, _of_values(builder, scales, tokens)):
            prefetch(builder, address, STRIP_ROW_BYTES)


prefetch_scales: Callable[[int, int, Real], None] = intrinsic(_prefetch_scales, INT, INT, KIND)
"""`prefetch_scales(scales, tokens, kind)`: prefetch a strip's scales; those of its values lie `tokens` columns behind
those of its keys.  `kind` is a value whose type is that of the cache; only int8 has scales."""


def _counted(builder: ir.IRBuilder, start: ir.Value, end: ir.Value) -> list[ir.Value]:
    """For each vector of a strip, which of its columns lie in `start ... end`."""
    first, last = (spread(builder, builder.trunc(bound, WORD), _WIDE) for bound in (start, end))
    masks = []
    for v in range(STRIP // LANES):
        columns = ir.Constant(_WIDE, list(range(v * LANES, (v + 1) * LANES)))
        masks.append(builder.and_(
            builder.icmp_signed(">=", columns, first), builder.icmp_signed("<", columns, last)))
    return masks


def _weights(builder: ir.IRBuilder, below: ir.Value) -> ir.Value:
    """2**x of a vector of numbers that are at most 0; 0 below `LOWEST`, and never a number too small for exp2."""
    is_seen = builder.fcmp_ordered(">=", below, all_of(_VECTOR, LOWEST))
    if not AVX512:
        weights = llvm.exp2(builder, _larger(builder, below, all_of(_VECTOR, LOWEST)))
        return builder.select(is_seen, weights, all_of(_VECTOR, 0.0))
    whole = call(builder, f"llvm.rint.v{LANES}f32", _VECTOR, below)
    value = polynomial(builder, builder.fsub(below, whole))
    return call(  # times 2**whole, rounded to nearest (4)
        builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, value, whole, all_of(_VECTOR, 0.0),
        builder.bitcast(is_seen, SHORT), ir.Constant(WORD, 4))


def _larger(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return fast(builder, f"llvm.maxnum.v{LANES}f32", _VECTOR, left, right)


def _softmax_strip(
    builder: ir.IRBuilder, scores: ir.Value, start: ir.Value, end: ir.Value, top: ir.Value, factor: ir.Value,
    scales: ir.Value, tokens: ir.Value, kind: ElementType,
) -> list[ir.Value]:
    places, counted = _places(builder, scores), _counted(builder, start, end)
    values = [builder.load(place) for place in places]
    for value in values:
        value.align = 4
    values = [builder.fmul(value, spread(builder, factor, _VECTOR)) for value in values]
    if kind == types.int8:
        values = _scaled(builder, values, counted, scales)
    values = [builder.select(*pair, all_of(_VECTOR, UNSEEN)) for pair in zip(counted, values, strict=True)]
    highest = _reduced(builder, "fmax", values, lambda *pair: _larger(builder, *pair))
    top = fast(builder, "llvm.maxnum.f32", SINGLE, highest, top)
    highest = spread(builder, top, _VECTOR)
    weights = [_weights(builder, builder.fsub(value, highest)) for value in values]
    total = _reduced(builder, "fadd", weights, builder.fadd)
    if kind == types.int8:
        weights = _scaled(builder, weights, counted, _of_values(builder, scales, tokens))
    _store_weights(builder, scores, weights, kind)
    return [top, total]


def _store_weights(builder: ir.IRBuilder, address: ir.Value, weights: list[ir.Value], kind: ElementType) -> None:
    for v, weight in enumerate(weights):
        if kind == types.int16:
            name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * LANES}"
            rounded = call(builder, name, ir.VectorType(BRAIN, LANES), weight)
            bits = builder.bitcast(rounded, ir.VectorType(SHORT, LANES))
            write(builder, bits, behind(builder, address, 2 * LANES * v), align=2)
        else:
            write(builder, weight, behind(builder, address, 4 * LANES * v))


class _SoftmaxStrip(Protocol):
    def __call__(
        self, scores: int, start: int, end: int, top: float, factor: float, scales: int, tokens: int, kind: Real, /
    ) -> tuple[float, float]: ...


softmax_strip: _SoftmaxStrip = intrinsic(
    _softmax_strip, INT, INT, INT, FLOAT, FLOAT, INT, INT, KIND, returns=types.UniTuple(FLOAT, 2))
"""Scores of a strip's columns `start ... end` to weights `2**(factor * score - new top)`, those of all others to 0.

The weights are stored in place of the scores, those of `PAIRS` as bfloat16 in the first half of their bytes.  `top` is
the largest score so far; returns the new one and the sum of the weights.  The other arguments are those of
`prefetch_scales`.
"""


@kernel
def soft_cap(scores: int, factor: float, cap: float) -> None:
    """Cap `factor` times a whole strip of scores, those that count and others; `cap` is in units of log 2."""
    factor = factor / cap
    for i in range(STRIP):
        store(scores, i, cap * tanh(load(scores, i, FLOAT32) * factor), FLOAT32)


@kernel
def add_biases(scores: int, factor: float, biases: int, low: int, high: int) -> None:
    """`factor` times scores `low ... high - 1`, and biases, which count from score 0, in units of log 2."""
    for i in range(low, high):
        store(scores, i, load(scores, i, FLOAT32) * factor + load(biases, i, FLOAT32) * LOG2_E, FLOAT32)


# The plan of a step: its rows cut into tiles, and the workspace that they need.

# The most queries (tokens x heads) of a tile: its scores stay in the first-level cache.
TILE_ROWS = 48
# Tokens of context per segment: another core's results are slow to read.
SEGMENT = 1024

# A tile: `TILE_WORDS` int32 in a table.  A cache line before the table holds the number of tiles.
ROW, TOKEN, TOKENS, FIRST, LAST, SEGMENT_INDEX, SEGMENTS, PART = range(8)
TILE_WORDS = 8
TABLE = 64

# Arguments of `_plan` and of `_attend`, in words after the header.
(
    MULTIPLY_ADDRESS, QUERY, OUT, CACHE, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, TILES, ARRIVALS, PARTS,
    SCRATCH, SCRATCH_BYTES, GROUP, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED, HEAD_BLOCK, WINDOW, SCALE_BITS,
    THREADS, PER_TILE, SOFT_CAP_BITS, SINKS, AHEAD, BIASES, NUM_BIASES, ARE_RELATIVE, HEADS_TOGETHER,
) = range(HEADER, HEADER + 32)
# Options, each 0 where a layer does not have it.  Relative biases count from that of the query's own place.
OPTIONS = range(SOFT_CAP_BITS, ARE_RELATIVE + 1)


class Workspace(NamedTuple):
    """Offsets in bytes of the parts of a step's workspace, behind the number of tiles and their table."""

    arrivals: int
    parts: int
    threads: int
    thread_bytes: int

    def floats(self, threads: int) -> int:
        """Size of the workspace in float32 words."""
        return (self.threads + threads * self.thread_bytes) // 4


# The fewest rows for each thread, and the most key-value heads, that are walked together.
LEAST_ROWS, MOST_HEADS = 4, 16


def heads_together(shape: AttentionShape, rows: int, tokens: int, threads: int) -> int:
    """Key-value heads that a thread walks together in a step of this size."""
    is_decode = rows == tokens and rows >= LEAST_ROWS * threads
    return shape.num_kv_heads if is_decode and shape.num_kv_heads <= MOST_HEADS else 1


@functools.lru_cache(maxsize=256)
def workspace(shape: AttentionShape, rows: int, tokens: int, max_context_len: int, heads: int) -> Workspace:
    """The largest workspace that a step of this size may need, with `heads` key-value heads walked together."""
    group, width = shape.num_heads // shape.num_kv_heads, padded(shape.head_dim)
    per_tile, strips = tile_tokens(group, heads=heads), -(-width // STRIP)
    queries, plan = per_tile * group, plan_workspace(
        group, shape.num_kv_heads, width, per_tile, rows, tokens, max_context_len)
    return plan._replace(thread_bytes=4 * queries * (STRIP + heads * (strips * STRIP + 2 * (width + 2))))


def tile_tokens(group: int, rows: int = TILE_ROWS, heads: int = 1) -> int:
    """The most tokens of a tile, of `group` queries each and at most about `rows` together; 1 for several `heads`."""
    return max(1, rows // group) if heads == 1 else 1


def plan_workspace(
    group: int, kv_heads: int, width: int, per_tile: int, rows: int, tokens: int, max_context_len: int,
) -> Workspace:
    """The parts that tiles and the results of segments need, of values `width` wide; nothing for threads."""
    segments = max_context_len // SEGMENT + 1
    results = segments * min(tokens, rows * per_tile)  # of tokens in segments
    arrivals = TABLE + 4 * TILE_WORDS * (rows * segments + rows + tokens // per_tile)
    parts = arrivals + 8 * results * kv_heads
    return Workspace(arrivals, parts, parts + 4 * results * group * kv_heads * (width + 2), 0)


@kernel
def first_seen(position: int, window: int) -> int:
    """The first place that a query sees; a window below 0 is a chunk of that size, and one of 0 has no limit."""
    if window < 0:
        return position // -window * -window
    return max(0, position - window + 1) if window > 0 else 0


def _plan(words: int) -> None:
    """Cut the step's rows into tiles, and the tile of a row that has only one into its segments."""
    starts, contexts = load(words, QUERY_STARTS, INT64), load(words, CONTEXT_LENS, INT64)
    tile, arrivals = load(words, TILES, INT64) + TABLE, load(words, ARRIVALS, INT64)
    kv_heads, window = load(words, KV_HEADS, INT64), load(words, WINDOW, INT64)
    ahead, per_tile = load(words, AHEAD, INT64), load(words, PER_TILE, INT64)
    count, parts = 0, 0
    for row in range(load(words, ROWS, INT64)):
        token, end = load(starts, row, INT32), load(starts, row + 1, INT32)
        is_one_tile = end - token <= per_tile
        while token < end:
            tokens = min(per_tile, end - token)
            position = load(contexts, row, INT32) - (end - token)
            first = first_seen(position, window)
            last = min(position + tokens + ahead, load(contexts, row, INT32))
            segments = (last - 1) // SEGMENT - first // SEGMENT + 1 if is_one_tile else 1
            for segment in range(segments):
                after = (first // SEGMENT + 1) * SEGMENT if segment + 1 < segments else last
                store(tile, ROW, row, INT32)
                store(tile, TOKEN, token, INT32)
                store(tile, TOKENS, tokens, INT32)
                store(tile, FIRST, first, INT32)
                store(tile, LAST, after, INT32)
                store(tile, SEGMENT_INDEX, segment, INT32)
                store(tile, SEGMENTS, segments, INT32)
                store(tile, PART, parts, INT32)
                tile += TILE_WORDS * 4
                first = after
            count += segments
            if segments > 1:
                for head in range(kv_heads):
                    store(arrivals, parts * kv_heads + head, 0, INT64)
                parts += segments * tokens
            token += tokens
    store(load(words, TILES, INT64), 0, count, INT64)


PLAN = CompiledKernel(_plan)


# The results of segments, and how they are merged, in the order of positions.
#
#     a result    sums [rows, width], maxima [rows], totals [rows], float32, together
#
# Threads leave the segments of a row of one tile in the step's workspace; the last thread joins them.


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


# The walk of a tile over its blocks.

# Lines prefetched while the scores of a query become weights, and queries whose scores do: a core is busy for longer
# than it takes to read so many lines.
PREFETCHED_LINES = 16
PREFETCHING_ROWS = 4
# Queries of a tile whose sums are always rescaled: where few share a block, a mispredicted branch costs more.
RESCALED_ROWS = 8
# Below every score.
NO_SCORE = float32(-1e20)
FLOAT_BYTES = 4

bytes_of_factor: Callable[[Real], int] = intrinsic(
    lambda _builder, stored: number(2 if stored == types.int16 else FLOAT_BYTES), KIND, returns=INT)
"""Bytes of an element of a query, and of a weight, in a cache of kind `stored`."""


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
def position_of(words: int, tile: int) -> int:
    """The position of a tile's first token."""
    row = load(tile, ROW, INT32)
    end = load(load(words, QUERY_STARTS, INT64), row + 1, INT32)
    return load(load(words, CONTEXT_LENS, INT64), row, INT32) - end + load(tile, TOKEN, INT32)


@kernel
def start_softmax(words: int, tile: int, head: int, place: int, sums: int) -> None:
    """Sums, maxima and totals before the segment that holds `place`: nothing, or sinks.

    The sink of each head is a first score without a value, in the first segment that a query sees.
    """
    group, sinks, width = load(words, GROUP, INT64), load(words, SINKS, INT64), load(words, DIM_PADDED, INT64)
    window, here, rows = load(words, WINDOW, INT64), position_of(words, tile), load(tile, TOKENS, INT32) * group
    maxima = sums + rows * width * 4
    totals = maxima + rows * 4
    fill(sums, rows * width, ZERO)
    fill(maxima, rows, NO_SCORE)
    fill(totals, rows, ZERO)
    if sinks != 0:
        for row in range(rows):
            first = first_seen(here + row // group, window)
            if first // SEGMENT == place // SEGMENT:
                store(maxima, row, load(sinks, head * group + row % group, FLOAT32) * LOG2_E, FLOAT32)
                store(totals, row, ONE, FLOAT32)


@kernel
def weigh(
    words: int, tile: int, head: int, scores: int, sums: int, state: int, low: int, high: int, base: int, scales: int,
    asked: int, stored: Real,
) -> None:
    """Scores of places `base + low ... base + high` to weights; the sums so far are rescaled to the new maximum.

    `scales` are those of place `base`, where the `stored` type has any.  Lines from `asked` on are prefetched, where
    that is an address.
    """
    columns = load(words, BLOCK_PADDED, INT64)
    group, width = load(words, GROUP, INT64), load(words, DIM_PADDED, INT64)
    tokens, window, here = load(tile, TOKENS, INT32), load(words, WINDOW, INT64), position_of(words, tile) - base
    cap, scale = load(words, SOFT_CAP_BITS, INT64), float_of(load(words, SCALE_BITS, INT64))
    biases, step = load(words, BIASES, INT64), load(words, NUM_BIASES, INT64) * FLOAT_BYTES
    factor, ahead = scale if cap == 0 and biases == 0 else ONE, load(words, AHEAD, INT64)
    row, is_low = 0, tokens * group <= RESCALED_ROWS
    for _ in range(tokens):
        # The query's own place, as a column, is the last it sees, or `ahead` columns behind it are.
        end = min(high, here + 1 + ahead)
        start = max(low, first_seen(here + base, window) - base)
        for member in range(group):
            if asked != 0 and row < PREFETCHING_ROWS:
                prefetch_soon(asked + row * PREFETCHED_LINES * LINE, PREFETCHED_LINES * LINE)
            if cap != 0:
                soft_cap(scores, scale, float_of(cap))
            if biases != 0:
                of_head = biases + (head * group + member) * step + base * FLOAT_BYTES
                of_head -= load(words, ARE_RELATIVE, INT64) * (here + base) * FLOAT_BYTES
                add_biases(scores, ONE if cap != 0 else scale, of_head, start, end)
            before = load(state, row, FLOAT32)
            top, added = softmax_strip(scores, start, end, before, factor, scales, columns, stored)
            keep = exp2(before - top)
            store(state, row, top, FLOAT32)
            store(state, tokens * group + row, load(state, tokens * group + row, FLOAT32) * keep + added, FLOAT32)
            if is_low or keep != ONE:
                for i in range(width):
                    store(sums, i, load(sums, i, FLOAT32) * keep, FLOAT32)
            row += 1
            scores += STRIP_ROW_BYTES
            sums += width * 4
        here += 1


@kernel
def add_values(
    words: int, tile: int, weights: int, sums: int, values: int, stride: int, place: int, places: int, ahead: int,
    stored: Real,
) -> None:
    """Add the weighted values of `places` places from `place` on, which lie `stride` bytes from one to the next.

    A value is not read for a query that does not see it: a draft's values may not be finite, and weights of 0 do not
    hide that from the queries before it.
    """
    multiply, width, size = load(words, MULTIPLY_ADDRESS, INT64), load(words, DIM_PADDED, INT64), bytes_of(stored)
    rows, here = load(words, GROUP, INT64), position_of(words, tile)
    tokens, seen = load(tile, TOKENS, INT32), here - place + 1 + load(words, AHEAD, INT64)
    if seen >= places:  # by the first token, and so by all
        rows, tokens = rows * tokens, 1
    for _ in range(tokens):
        if seen > 0:
            call_multiply(multiply, rows, width, weights, 0, values, stride, PAIR * size, min(seen, places), sums,
                          width * 4, ahead)
        weights += rows * STRIP_ROW_BYTES
        sums += rows * width * 4
        seen += 1


@kernel
def block_at(words: int, tile: int, head: int, entry: int) -> int:
    """Address of the `entry`th block of a tile's row."""
    table = load(words, TABLES, INT64) + load(tile, ROW, INT32) * load(words, TABLE_WIDTH, INT64) * 4
    block = load(table, entry, INT32) * load(words, KV_HEADS, INT64) + head
    return load(words, CACHE, INT64) + block * load(words, HEAD_BLOCK, INT64)


@kernel
def _query_bytes(words: int, tile: int) -> int:
    """Bytes of a tile's queries of one key-value head."""
    strips = (load(words, DIM_PADDED, INT64) + STRIP - 1) // STRIP
    return load(tile, TOKENS, INT32) * load(words, GROUP, INT64) * strips * STRIP_ROW_BYTES


@kernel
def _sum_bytes(words: int, tile: int) -> int:
    """Bytes of a tile's sums, maxima and totals of one key-value head."""
    return load(tile, TOKENS, INT32) * load(words, GROUP, INT64) * (load(words, DIM_PADDED, INT64) + 2) * FLOAT_BYTES


@kernel
def _walk(
    words: int, tile: int, head: int, heads: int, place: int, last: int, queries: int, scores: int, sums: int,
    next_keys: int, stored: Real,
) -> None:
    """Add the weighted values of places `place ... last` of a tile, block by block; `next_keys` is read after them.

    Of each block all key-value heads from `head` on that are walked together.
    """
    block, block_padded = load(words, BLOCK, INT64), load(words, BLOCK_PADDED, INT64)
    dim, width, size = load(words, DIM, INT64), load(words, DIM_PADDED, INT64), bytes_of(stored)
    multiply = load(words, MULTIPLY_ADDRESS, INT64)
    rows, query_bytes, sum_bytes = (
        load(tile, TOKENS, INT32) * load(words, GROUP, INT64), _query_bytes(words, tile), _sum_bytes(words, tile))
    entry, offset = place // block, place % block
    while place < last:
        start = offset // STRIP * STRIP
        low = offset - start
        high = min(min(block - start, STRIP), low + last - place)
        after, next_entry = offset + high - low, entry
        if after == block:
            after, next_entry = 0, entry + 1
        for member in range(heads):
            keys = block_at(words, tile, head + member, entry)
            following, next_start = next_keys, 0
            if member + 1 < heads:
                following, next_start = block_at(words, tile, head + member + 1, entry), start
            elif place + high - low < last:
                following, next_start = block_at(words, tile, head, next_entry), after // STRIP * STRIP
            own, state = queries + member * query_bytes, sums + member * sum_bytes
            values = keys + (dim * block_padded + (start + low) * width) * size
            next_values = following + (dim * block_padded + next_start * width) * size
            column = low // PAIR * PAIR
            columns = min(block_padded - start, (high + PAIR - 1) // PAIR * PAIR) - column
            read = keys + (start + column) * size
            scales = keys + (dim * block_padded + block * width) * size + start * 4
            prefetch_scales(scales, block_padded, stored)
            fill(scores, rows * STRIP, ZERO)
            call_multiply(multiply, rows, columns, own, rows * STRIP_ROW_BYTES, read, block_padded * size, PAIR * size,
                          dim, scores + column * 4, STRIP_ROW_BYTES, following + next_start * size - read)
            weigh(words, tile, head + member, scores, state, state + rows * width * 4, low, high, place - low, scales,
                  next_values, stored)
            # Pairs begin at even columns for all queries, or sums would depend on where the tile begins.
            back = low % (FLOAT_BYTES // bytes_of_factor(stored))
            add_values(words, tile, scores + (low - back) * bytes_of_factor(stored), state,
                       values - back * width * size, width * size, place - back, high - low + back,
                       next_values - values, stored)
        entry, offset = next_entry, after
        place += high - low


@kernel
def store_outputs(words: int, tile: int, head: int, sums: int, totals: int, kind: Real) -> None:
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
    words: int, tile: int, head: int, heads: int, queries: int, scores: int, sums: int, next_keys: int, stored: Real
) -> None:
    """Sums, maxima and totals of all places of a tile; those of each segment but the first lie behind them first."""
    width, rows = load(words, DIM_PADDED, INT64), load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    place, last, block = load(tile, FIRST, INT32), load(tile, LAST, INT32), load(words, BLOCK, INT64)
    sum_bytes = _sum_bytes(words, tile)
    others = sums + heads * sum_bytes
    into = sums
    while place < last:
        end = min(last, (place // SEGMENT + 1) * SEGMENT)
        following = next_keys if end == last else block_at(words, tile, head, end // block)
        for member in range(heads):
            start_softmax(words, tile, head + member, place, into + member * sum_bytes)
        _walk(words, tile, head, heads, place, end, queries, scores, into, following, stored)
        if into != sums:
            for member in range(heads):
                merge(rows, width, sums + member * sum_bytes, others + member * sum_bytes)
        into = others
        place = end


@kernel
def tile_of(words: int, item: int, items_of_a_tile: int) -> int:
    """The tile of an item; an item is one head of a tile, or some."""
    return load(words, TILES, INT64) + TABLE + item // items_of_a_tile * TILE_WORDS * 4


@kernel
def _first_keys(words: int, item: int, heads: int) -> int:
    """Address of the first keys an item reads."""
    items_of_a_tile = load(words, KV_HEADS, INT64) // heads
    tile = tile_of(words, item, items_of_a_tile)
    entry = load(tile, FIRST, INT32) // load(words, BLOCK, INT64)
    return block_at(words, tile, item % items_of_a_tile * heads, entry)


@kernel
def _attend(words: int, kind: Real, stored: Real) -> None:
    width, heads = load(words, DIM_PADDED, INT64), load(words, HEADS_TOGETHER, INT64)
    group, threads = load(words, GROUP, INT64), load(words, THREADS, INT64)
    most, items_of_a_tile = load(words, PER_TILE, INT64) * group, load(words, KV_HEADS, INT64) // heads
    thread = fetch_add(words + THREAD_COUNTER, 1)
    queries = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    scores = queries + heads * most * ((width + STRIP - 1) // STRIP) * STRIP_ROW_BYTES
    sums = scores + most * STRIP_ROW_BYTES
    items = load(load(words, TILES, INT64), 0, INT64) * items_of_a_tile
    prefetched = NOTHING
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        tile, head = tile_of(words, item, items_of_a_tile), item % items_of_a_tile * heads
        if item != prefetched and load(words, BLOCK_PADDED, INT64) <= STRIP:  # the first item, or a stolen one
            prefetch_soon(_first_keys(words, item, heads), load(words, HEAD_BLOCK, INT64))
        prefetched = upcoming(words, thread, threads, items)
        next_keys = _first_keys(words, item if prefetched == NOTHING else prefetched, heads)
        for member in range(heads):
            _load_queries(words, tile, head + member, queries + member * _query_bytes(words, tile), kind, stored)
        _walk_segments(words, tile, head, heads, queries, scores, sums, next_keys, stored)
        for member in range(heads):
            own = sums + member * _sum_bytes(words, tile)
            totals = own + load(tile, TOKENS, INT32) * group * (width + 1) * 4
            if load(tile, SEGMENTS, INT32) == 1:
                store_outputs(words, tile, head + member, own, totals, kind)
            elif leave_part(words, tile, head + member, own):
                join_parts(words, tile, head + member, own)
                store_outputs(words, tile, head + member, own, totals, kind)
        item = pop(words, thread, threads, items)


ATTEND = {
    (dtype, cached): specialized(_attend, kind, stored)
    for dtype, kind in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32))
    for cached, stored in ((dtype, kind), (torch.int8, INT8))}
"""The kernels, by the types of the queries and of the cache."""

ATTEND_PAIRS = specialized(_attend, BFLOAT16, PAIRS)
"""The kernel for bfloat16 that is multiplied in pairs."""

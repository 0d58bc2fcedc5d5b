"""Compressed attention over the paged cache (`LatentShape`), and the products of each head around it.

    query ─► q_nope @ key_up, per head ─► attend over latents ─► @ value_up, per head

Tiles, segments and their merging are those of `attention.py`, with all heads as queries of one key-value head; or,
where a step has fewer rows than there are threads, with a part of the heads as queries of each of several key-value
heads, which share a cache.  What differs is the product that makes scores.  A row of the cache is a token's key, and
its beginning a token's value.  Values are multiplied as they lie, but scores would need the rows as columns.  So scores
are made transposed, with rows of the cache as A, copied to strips, and queries as B; the scores of a strip, far fewer
numbers, are transposed afterwards.

    scores.T [places, queries]  =  rows [places, width] @ queries [width, queries]
    sums [queries, rank]       +=  weights [queries, places] @ rows [places, first rank columns]

A position's result depends on the positions that it sees and on nothing else, bit for bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu import attention
from slotwise.compute.kernels.cpu.attention import (
    BLOCK,
    DIM,
    DIM_PADDED,
    FIRST,
    GROUP,
    KV_HEADS,
    LAST,
    OPTIONS,
    PER_TILE,
    QUERY,
    SCRATCH,
    SCRATCH_BYTES,
    SEGMENT,
    SEGMENTS,
    THREADS,
    TILES,
    TOKEN,
    TOKENS,
    Workspace,
    add_values,
    block_at,
    bytes_of_factor,
    join_parts,
    leave_part,
    merge,
    start_softmax,
    store_outputs,
    tile_of,
    weigh,
)
from slotwise.compute.kernels.cpu.cache import latent_columns, padded, stored_order
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel, kernel, specialized
from slotwise.compute.kernels.cpu.launcher import HEADER, THREAD_COUNTER, KernelLauncher
from slotwise.compute.kernels.cpu.pointwise import inverse_rms
from slotwise.compute.kernels.cpu.processor import LANES, PAIR
from slotwise.compute.kernels.cpu.products import gemm
from slotwise.compute.kernels.cpu.products.gemm import STRIP, STRIP_ROW_BYTES, call_multiply
from slotwise.compute.kernels.cpu.rotary import stored_at
from slotwise.compute.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    PAIRS,
    ZERO,
    Real,
    bytes_of,
    fetch_add,
    fill,
    float_of,
    load,
    store,
)
from slotwise.compute.kernels.cpu.threads import NOTHING, pop
from slotwise.compute.kernels.interface import LatentShape

# Storing latents and rotary keys.  Arguments in words after the header:
(
    S_QUERY, COMPRESSED, S_CACHE, ROTARY, POSITIONS, SLOTS, NUM_TOKENS, HEADS, NOPE, ROPE, RANK, S_BLOCK, BLOCK_BYTES,
    NORM, EPS_BITS, HAS_NEIGHBORS,
) = range(HEADER, HEADER + 16)


@kernel
def _rotate(words: int, token: int, x: int, target: int, columns: int, kind: Real) -> None:
    """The rotary part at `x`, rotated, to `target`, in the order of a cache with `columns`; 0: as it was."""
    rope, has_neighbors = load(words, ROPE, INT64), load(words, HAS_NEIGHBORS, INT64)
    half = rope // 2
    cosine = load(words, ROTARY, INT64) + load(load(words, POSITIONS, INT64), token, INT64) * rope * 4
    step, apart = (2, 1) if has_neighbors != 0 else (1, half)
    for i in range(half):
        low, high = load(x, i * step, kind), load(x, i * step + apart, kind)
        c, s = load(cosine, i, FLOAT32), load(cosine, half + i, FLOAT32)
        first, second = low * c - high * s, high * c + low * s
        if columns == 0:
            store(target, i * step, first, kind)
            store(target, i * step + apart, second, kind)
        else:
            store(target, stored_at(i * step, columns, kind), first, kind)
            store(target, stored_at(i * step + apart, columns, kind), second, kind)


@kernel
def _store_token(words: int, token: int, kind: Real) -> None:
    heads, nope, rope = load(words, HEADS, INT64), load(words, NOPE, INT64), load(words, ROPE, INT64)
    rank, size = load(words, RANK, INT64), bytes_of(kind)
    for head in range(heads):
        at = load(words, S_QUERY, INT64) + ((token * heads + head) * (nope + rope) + nope) * size
        _rotate(words, token, at, at, 0, kind)
    slot, block = load(load(words, SLOTS, INT64), token, INT64), load(words, S_BLOCK, INT64)
    columns = (rank + LANES - 1) // LANES * LANES
    turned = (rope + LANES - 1) // LANES * LANES
    target = load(words, S_CACHE, INT64) + slot // block * load(words, BLOCK_BYTES, INT64)
    target += slot % block * (columns + turned) * size
    source, norm = load(words, COMPRESSED, INT64) + token * (rank + rope) * size, load(words, NORM, INT64)
    factor = inverse_rms(source, rank, float_of(load(words, EPS_BITS, INT64)), kind)
    for i in range(rank):
        value = load(source, i, kind) * factor * load(norm, i, FLOAT32)
        store(target, stored_at(i, columns, kind), value, kind)
    for i in range(rank, columns):
        store(target, stored_at(i, columns, kind), ZERO, kind)
    target += columns * size
    _rotate(words, token, source + rank * size, target, turned, kind)
    for i in range(rope, turned):
        store(target, stored_at(i, turned, kind), ZERO, kind)


@kernel
def _store(words: int, kind: Real) -> None:
    tokens = load(words, NUM_TOKENS, INT64)
    token = fetch_add(words, 1)
    while token < tokens:
        _store_token(words, token, kind)
        token = fetch_add(words, 1)


STORE = {torch.bfloat16: specialized(_store, BFLOAT16), torch.float32: specialized(_store, FLOAT32)}


# Products of each head by itself, `[tokens, heads, depth] -> [tokens, heads, outputs]`.

# Tokens that a thread takes, with one panel of one head.
PRODUCT_ROWS = 32
# Bytes ahead of the line of a panel that is multiplied; a thread's next panel lies behind it.
PREFETCHED = 8192

# Arguments in words after the header.  `TURNED` numbers behind each head's input are copied behind its output.
(
    P_MULTIPLY, X, WEIGHTS, OUT, P_TOKENS, P_HEADS, DEPTH, OUTPUTS, TURNED, P_SCRATCH, P_SCRATCH_BYTES, P_THREADS,
) = range(HEADER, HEADER + 12)


class HeadWeights(NamedTuple):
    """The weights of each head: panels of 64 outputs, `[depth, outputs of the panel]`, one behind the other."""

    panels: Tensor  # [heads, padded outputs * depth]
    outputs: int
    depth: int


def pack(weights: Tensor, launcher: KernelLauncher) -> HeadWeights:
    """Packs `[heads, outputs, depth]` into the memory of the launcher's weights."""
    heads, outputs, depth = weights.shape
    if weights.is_meta:
        return HeadWeights(weights, outputs, depth)
    columns = torch.zeros(heads, depth, padded(outputs), dtype=weights.dtype)
    columns[..., :outputs] = weights.transpose(1, 2)
    panels = [panel[..., stored_order(panel.shape[-1], panel.dtype)].flatten(1)
              for panel in columns.split(STRIP, dim=2)]
    return HeadWeights(launcher.weights.copy(torch.cat(panels, dim=1).contiguous()), outputs, depth)


@kernel
def load_strips(source: int, count: int, target: int, strip_bytes: int, kind: Real, stored: Real) -> None:
    """`count` numbers as columns of strips: float32, or bfloat16 where they are multiplied in pairs."""
    size = bytes_of(kind)
    for start in range(0, count, STRIP):
        columns, here = min(STRIP, count - start), source + start * size
        if bytes_of_factor(stored) == bytes_of(FLOAT32):
            for i in range(columns):
                store(target, i, load(here, i, kind), FLOAT32)
        else:
            for i in range(columns // 2):  # as they are, two at a time
                store(target, i, load(here, i, FLOAT32), FLOAT32)
            if columns % 2:
                store(target, columns - 1, load(here, columns - 1, kind), kind)
                store(target, columns, ZERO, kind)
        target += strip_bytes


@kernel
def _product_item(
    words: int, head: int, first: int, column: int, scratch: int, is_held: bool, kind: Real, stored: Real,
) -> None:
    """A panel of a head's outputs for up to `PRODUCT_ROWS` tokens from `first` on.

    `is_held`: the scratch has these tokens' inputs of this head already.
    """
    rows, heads = min(PRODUCT_ROWS, load(words, P_TOKENS, INT64) - first), load(words, P_HEADS, INT64)
    depth, outputs, turned = load(words, DEPTH, INT64), load(words, OUTPUTS, INT64), load(words, TURNED, INT64)
    size, wide = bytes_of(kind), (outputs + LANES - 1) // LANES * LANES
    width, strip_bytes = min(STRIP, wide - column), PRODUCT_ROWS * STRIP_ROW_BYTES
    sums = scratch + (depth + STRIP - 1) // STRIP * strip_bytes
    source = load(words, X, INT64) + (first * heads + head) * (depth + turned) * size
    target = load(words, OUT, INT64) + (first * heads + head) * (outputs + turned) * size
    row, out_row = heads * (depth + turned) * size, heads * (outputs + turned) * size
    for token in range(0 if is_held else rows):
        x, out = source + token * row, target + token * out_row
        load_strips(x, depth, scratch + token * STRIP_ROW_BYTES, strip_bytes, kind, stored)
        if column == 0:
            for i in range(turned):
                store(out, outputs + i, load(x, depth + i, kind), kind)
    fill(sums, rows * width, ZERO)
    panel = load(words, WEIGHTS, INT64) + (head * wide + column) * depth * size
    call_multiply(load(words, P_MULTIPLY, INT64), rows, width, scratch, strip_bytes, panel, width * size, PAIR * size,
                  depth, sums, width * 4, PREFETCHED)
    columns = min(width, outputs - column)
    for token in range(rows):
        at, out = sums + token * width * 4, target + token * out_row + column * size
        for i in range(columns):
            store(out, i, load(at, i, FLOAT32), kind)


@kernel
def _product(words: int, kind: Real, stored: Real) -> None:
    heads, outputs, tokens = load(words, P_HEADS, INT64), load(words, OUTPUTS, INT64), load(words, P_TOKENS, INT64)
    panels, tiles = (outputs + STRIP - 1) // STRIP, (tokens + PRODUCT_ROWS - 1) // PRODUCT_ROWS
    thread = fetch_add(words + THREAD_COUNTER, 1)
    scratch = load(words, P_SCRATCH, INT64) + thread * load(words, P_SCRATCH_BYTES, INT64)
    items, threads = heads * panels * tiles, load(words, P_THREADS, INT64)
    held, item = -1, pop(words, thread, threads, items)
    while item != NOTHING:
        inputs, panel = item // panels, item % panels
        _product_item(words, inputs // tiles, inputs % tiles * PRODUCT_ROWS, panel * STRIP, scratch, inputs == held,
                      kind, stored)
        held = inputs
        item = pop(words, thread, threads, items)


PRODUCT = {torch.bfloat16: specialized(_product, BFLOAT16, BFLOAT16),
           torch.float32: specialized(_product, FLOAT32, FLOAT32)}
PRODUCT_PAIRS = specialized(_product, BFLOAT16, PAIRS)


def multiply(launcher: KernelLauncher, x: Tensor, weights: HeadWeights, turned: int, *, has_pairs: bool) -> Tensor:
    """`x [tokens, heads * (depth + turned)] -> [tokens, heads * (outputs + turned)]`, of which `turned` are copied."""
    tokens, heads = len(x), len(weights.panels)
    out = launcher.empty((tokens, heads * (weights.outputs + turned)), x.dtype)
    strips = -(-weights.depth // STRIP)
    floats = PRODUCT_ROWS * (strips + 1) * STRIP
    code, product = (PRODUCT_PAIRS, gemm.MULTIPLY_PAIRS) if has_pairs else (PRODUCT[x.dtype], gemm.MULTIPLY[x.dtype])
    launcher.give(
        product.address, x.data_ptr(), weights.panels.data_ptr(), out.data_ptr(), tokens, heads, weights.depth,
        weights.outputs, turned, launcher.scratch(floats * launcher.threads), 4 * floats, launcher.threads)
    launcher.together(code)
    return out


# Attention.

# The most queries (tokens x heads) of a tile: four vectors of scores.
TILE_ROWS = 64

# Arguments behind those of `attention.py`: the product that makes scores, the columns of a row of the cache, and how
# many of a query's last numbers are rotary.
MULTIPLY_SCORES, WIDTH, ROTARY_DIM = range(OPTIONS.stop, OPTIONS.stop + 3)


@functools.lru_cache(maxsize=256)
def parts_of_heads(shape: LatentShape, rows: int, tokens: int, max_context_len: int, threads: int) -> int:
    """Parts of the heads that are computed by themselves: one for each thread, where there would be fewer tiles.

    Each part reads all latents, so long contexts are divided into segments only.
    """
    is_short = rows == tokens < threads and max_context_len <= attention.SEGMENT
    return threads if is_short and not shape.num_heads % threads and not LANES % threads else 1


@functools.lru_cache(maxsize=256)
def workspace(shape: LatentShape, rows: int, tokens: int, max_context_len: int, parts: int) -> Workspace:
    """The largest workspace that a step of this size may need: that of `attention.py`, and more for each thread.

    A thread has queries as columns, strips of the cache, scores transposed, scores, then sums twice.

    Args:
        parts: of the heads.
    """
    group = shape.num_heads // parts
    per_tile = attention.tile_tokens(group, TILE_ROWS, parts)
    width, values, queries = latent_columns(shape), padded(shape.rank), per_tile * group
    columns, strips = padded(queries), -(-width // STRIP)
    floats = width * columns + strips * STRIP * STRIP + STRIP * columns + queries * STRIP + 2 * queries * (values + 2)
    plain = attention.plan_workspace(group, parts, values, per_tile, rows, tokens, max_context_len)
    return plain._replace(thread_bytes=4 * floats)


@kernel
def _turn(
    source: int, rows: int, row_bytes: int, count: int, queries: int, columns: int, kind: Real, stored: Real,
) -> None:
    """`count` numbers of every query as rows of `[width, columns]`, in the order of the cache, and zeros as padding.

    In pairs of bfloat16, queries lie in that order, too.
    """
    factor, padded_count = bytes_of_factor(stored), (count + LANES - 1) // LANES * LANES
    fill(queries, padded_count * columns * factor // 4, ZERO)
    for i in range(count):
        target = queries + stored_at(i, padded_count, kind) * columns * factor
        if factor == bytes_of(FLOAT32):
            for row in range(rows):
                store(target, row, load(source + row * row_bytes, i, kind), FLOAT32)
        else:
            for row in range(rows):
                store(target, stored_at(row, columns, stored), load(source + row * row_bytes, i, kind), kind)


@kernel
def _load_queries(words: int, tile: int, part: int, queries: int, columns: int, kind: Real, stored: Real) -> None:
    """The tile's queries of a part of the heads as columns, `[width, columns]`: float32, or pairs of bfloat16."""
    group, rank, turned = load(words, GROUP, INT64), load(words, DIM, INT64), load(words, ROTARY_DIM, INT64)
    rows, row_bytes = load(tile, TOKENS, INT32) * group, (rank + turned) * bytes_of(kind)
    first = load(tile, TOKEN, INT32) * load(words, KV_HEADS, INT64) + part
    source = load(words, QUERY, INT64) + first * group * row_bytes
    _turn(source, rows, row_bytes, rank, queries, columns, kind, stored)
    behind = queries + load(words, DIM_PADDED, INT64) * columns * bytes_of_factor(stored)
    _turn(source + rank * bytes_of(kind), rows, row_bytes, turned, behind, columns, kind, stored)


@kernel
def _score(
    words: int, tile: int, rows: int, places: int, queries: int, columns: int, strips: int, scores: int, low: int,
    kind: Real, stored: Real,
) -> None:
    """Scores of `places` rows of the cache from the address `rows` on, in columns `low` and on of each query's strip.

    Behind `strips [strips, 64, 64]` is room for the scores as they are multiplied, `[64, columns]`.
    """
    width, size = load(words, WIDTH, INT64), bytes_of(kind)
    strip_bytes = STRIP * STRIP_ROW_BYTES
    turned = strips + (width + STRIP - 1) // STRIP * strip_bytes
    for place in range(places):
        load_strips(rows + place * width * size, width, strips + place * STRIP_ROW_BYTES, strip_bytes, kind, stored)
    fill(turned, places * columns, ZERO)
    factor = bytes_of_factor(stored)
    call_multiply(load(words, MULTIPLY_SCORES, INT64), places, columns, strips, strip_bytes, queries, columns * factor,
                  PAIR * factor, width, turned, columns * 4, 0)
    for query in range(load(tile, TOKENS, INT32) * load(words, GROUP, INT64)):
        target = scores + query * STRIP_ROW_BYTES + low * 4
        for place in range(places):
            store(target, place, load(turned, place * columns + query, FLOAT32), FLOAT32)


@kernel
def _walk(
    words: int, tile: int, part: int, place: int, last: int, queries: int, columns: int, strips: int, scores: int,
    sums: int, kind: Real, stored: Real,
) -> None:
    """Add the weighted values of places `place ... last` of a tile, block by block."""
    block, row_bytes = load(words, BLOCK, INT64), load(words, WIDTH, INT64) * bytes_of(kind)
    queries_of_tile = load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    state = sums + queries_of_tile * load(words, DIM_PADDED, INT64) * 4
    entry, offset = place // block, place % block
    rows = block_at(words, tile, 0, entry)
    while place < last:
        start = offset // STRIP * STRIP
        low = offset - start
        high = min(min(block - start, STRIP), low + last - place)
        here = rows + (start + low) * row_bytes
        _score(words, tile, here, high - low, queries, columns, strips, scores, low, kind, stored)
        offset += high - low
        following = here + (high - low) * row_bytes
        if offset == block and place + high - low < last:
            entry, offset = entry + 1, 0
            rows = block_at(words, tile, 0, entry)
            following = rows
        ahead = following - here if place + high - low < last else 0
        weigh(words, tile, part, scores, sums, state, low, high, place - low, 0, 0, stored)
        # Pairs begin at even places for all queries, or sums would depend on where the tile begins.
        back = low % (bytes_of(FLOAT32) // bytes_of_factor(stored))
        add_values(words, tile, scores + (low - back) * bytes_of_factor(stored), sums, here - back * row_bytes,
                   row_bytes, place - back, high - low + back, ahead, stored)
        place += high - low


@kernel
def _walk_segments(
    words: int, tile: int, part: int, queries: int, columns: int, strips: int, scores: int, sums: int, kind: Real,
    stored: Real,
) -> None:
    """Sums, maxima and totals of all places of a tile; those of each segment but the first lie behind them first."""
    width, rows = load(words, DIM_PADDED, INT64), load(tile, TOKENS, INT32) * load(words, GROUP, INT64)
    place, last = load(tile, FIRST, INT32), load(tile, LAST, INT32)
    others = sums + rows * (width + 2) * 4
    into = sums
    while place < last:
        end = min(last, (place // SEGMENT + 1) * SEGMENT)
        start_softmax(words, tile, part, place, into)
        _walk(words, tile, part, place, end, queries, columns, strips, scores, into, kind, stored)
        if into != sums:
            merge(rows, width, sums, others)
        into = others
        place = end


@kernel
def _attend_latents(words: int, kind: Real, stored: Real) -> None:
    width, values, group = load(words, WIDTH, INT64), load(words, DIM_PADDED, INT64), load(words, GROUP, INT64)
    threads, most = load(words, THREADS, INT64), load(words, PER_TILE, INT64) * group
    parts = load(words, KV_HEADS, INT64)
    wide = (most + LANES - 1) // LANES * LANES
    thread = fetch_add(words + THREAD_COUNTER, 1)
    queries = load(words, SCRATCH, INT64) + thread * load(words, SCRATCH_BYTES, INT64)
    strips = queries + width * wide * 4
    scores = strips + ((width + STRIP - 1) // STRIP * STRIP + wide) * STRIP_ROW_BYTES
    sums = scores + most * STRIP_ROW_BYTES
    items = load(load(words, TILES, INT64), 0, INT64) * parts
    item = pop(words, thread, threads, items)
    while item != NOTHING:
        tile, part = tile_of(words, item, parts), item % parts
        rows = load(tile, TOKENS, INT32) * group
        columns = (rows + LANES - 1) // LANES * LANES
        totals = sums + rows * (values + 1) * 4
        _load_queries(words, tile, part, queries, columns, kind, stored)
        _walk_segments(words, tile, part, queries, columns, strips, scores, sums, kind, stored)
        if load(tile, SEGMENTS, INT32) == 1:
            store_outputs(words, tile, part, sums, totals, kind)
        elif leave_part(words, tile, part, sums):
            join_parts(words, tile, part, sums)
            store_outputs(words, tile, part, sums, totals, kind)
        item = pop(words, thread, threads, items)


ATTEND = {torch.bfloat16: specialized(_attend_latents, BFLOAT16, BFLOAT16),
          torch.float32: specialized(_attend_latents, FLOAT32, FLOAT32)}
ATTEND_PAIRS = specialized(_attend_latents, BFLOAT16, PAIRS)


def kernels(kind: torch.dtype, *, has_pairs: bool) -> tuple[CompiledKernel, CompiledKernel, CompiledKernel]:
    """The kernel for a cache of `kind`, and the products that it calls: with values, and for scores."""
    if has_pairs:
        return ATTEND_PAIRS, gemm.MULTIPLY_PAIRS, gemm.MULTIPLY_PAIRS
    return ATTEND[kind], gemm.MULTIPLY[kind], gemm.MULTIPLY[torch.float32]

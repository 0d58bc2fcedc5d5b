"""Attention's plan of a step: its rows cut into tiles, and the workspace that they need.

A tile is a few tokens of a row, for all query heads of one key-value head.  A row that is one tile is cut again, into
the segments of its context, for several threads.

    segments    0 ... 1023 | 1024 ... 2047 | 2048 ...        by absolute position, whatever the row and the window
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from slotwise.kernels.cpu.cache import padded
from slotwise.kernels.cpu.gemm import STRIP
from slotwise.kernels.cpu.jit.compiler import Compiled
from slotwise.kernels.cpu.launcher import HEADER
from slotwise.kernels.cpu.simd import INT32, INT64, load, store
from slotwise.kernels.interface import AttentionShape

TILE_ROWS = 48  # the most queries (tokens x heads) of a tile: its scores stay in the first-level cache
SEGMENT = 1024  # tokens of context per segment: another core's results are slow to come by

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
    segments = max_context_len // SEGMENT + 1
    results = segments * min(tokens, rows * per_tile)  # of tokens in segments
    arrivals = TABLE + 4 * TILE_WORDS * (rows * segments + rows + tokens // per_tile)
    parts = arrivals + 8 * results * shape.num_kv_heads
    threads = parts + 4 * results * shape.num_heads * (width + 2)
    strips = -(-width // STRIP)
    return Workspace(arrivals, parts, threads, 4 * per_tile * group * ((strips + 1) * STRIP + 2 * (width + 2)))


def _plan(words: int) -> None:
    """Cut the step's rows into tiles, and the tile of a row that has only one into its segments."""
    starts, contexts = load(words, QUERY_STARTS, INT64), load(words, CONTEXT_LENS, INT64)
    tile, arrivals = load(words, TILES, INT64) + TABLE, load(words, ARRIVALS, INT64)
    kv_heads, window = load(words, KV_HEADS, INT64), load(words, WINDOW, INT64)
    per_tile = max(1, TILE_ROWS // load(words, GROUP, INT64))
    count, parts = 0, 0
    for row in range(load(words, ROWS, INT64)):
        token, end = load(starts, row, INT32), load(starts, row + 1, INT32)
        is_one_tile = end - token <= per_tile
        while token < end:
            tokens = min(per_tile, end - token)
            position = load(contexts, row, INT32) - (end - token)
            first = max(0, position - window + 1) if window > 0 else 0
            last = position + tokens
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


PLAN = Compiled(_plan)

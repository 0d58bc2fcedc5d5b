"""How a step's attention is cut into tiles, before any key is read (see `attention.py`).

Cuts follow from a row alone, not from its batch-mates.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from slotwise.kernels.cpu.cache import padded
from slotwise.kernels.cpu.compiled import Compiled
from slotwise.kernels.cpu.gemm import STRIP
from slotwise.kernels.cpu.launcher import HEADER
from slotwise.kernels.cpu.simd import INT32, INT64, load, store
from slotwise.kernels.interface import AttentionShape

TILE_ROWS = 48  # the most queries (tokens x heads) of a tile: its scores stay in the first-level cache
SEGMENT = 1024  # tokens of context per segment of a decode row: another core's results are slow to come by

# A tile: `TILE_WORDS` int32 in a table.
ROW, TOKEN, TOKENS, FIRST, LAST, SEGMENT_INDEX, SEGMENTS, PART = range(8)
TILE_WORDS = 8
TABLE = 64  # bytes before the table: a cache line for the number of tiles

# Arguments of `plan` and of `attend`, in words after the header.
(
    MULTIPLY_ADDRESS, QUERY, OUT, CACHE, TABLES, TABLE_WIDTH, QUERY_STARTS, CONTEXT_LENS, ROWS, TILES, ARRIVALS, PARTS,
    SCRATCH, SCRATCH_BYTES, GROUP, KV_HEADS, DIM, DIM_PADDED, BLOCK, BLOCK_PADDED, HEAD_BLOCK, WINDOW, SCALE_BITS,
    THREADS,
) = range(HEADER, HEADER + 24)


class Workspace(NamedTuple):
    """Offsets of the parts of the workspace of a step's attention, in bytes from its start.

    The number of tiles comes first, then their table.
    """

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


def _plan(words):
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


PLAN = Compiled(_plan, "void(int64)")

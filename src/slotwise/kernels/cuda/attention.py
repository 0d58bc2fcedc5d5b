"""Launches the attention kernels of a step, with their grids.  Nothing here waits for the device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slotwise.kernels.cuda import decode, prefill
from slotwise.kernels.cuda.cache import CudaCache
from slotwise.kernels.cuda.configs import Tuning
from slotwise.kernels.cuda.tile import OPERANDS
from slotwise.kernels.interface import AttentionShape, RaggedBatch

LOG2_E = math.log2(math.e)
SMALLEST_TILE = 16  # rows of the smallest `tl.dot`
SPLIT_TOKENS = 128  # of a step whose rows with drafts are split, too: each token takes memory for all its segments


def attend(
    query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, tuning: Tuning,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row over its own cached context: `[tokens, heads * head_dim]`.

    Rows of few new tokens are split along their context (`decode.py`), the others are cut into tiles of queries
    (`prefill.py`).  Both add a query's positions in the same order, in segments.
    """
    query = query.contiguous()
    out = torch.empty_like(query)
    if not len(query):
        return out.flatten(1)
    longest = batch.max_query_len
    layer = _Layer(shape, sinks, short_row(longest, len(query), shape))
    if longest > layer.short:
        _attend_long(out, query, cache, batch, layer, tuning)
    if longest <= layer.short or len(query) < len(batch.context_lens) * longest:  # else all have `longest` new tokens
        _attend_short(out, query, cache, batch, layer, tuning)
    return out.flatten(1)


class _Layer(NamedTuple):
    """What is the same for all rows."""

    shape: AttentionShape
    sinks: Tensor | None
    short: int  # new tokens of a row that is split along its context, at most


def short_row(longest: int, tokens: int, shape: AttentionShape) -> int:
    """The most new tokens of a row that is split along its context, in a step with rows of up to `longest`.

    As many as the smallest tile holds with the query heads of a key head; larger tiles spill registers.  With 1 partial
    results have a place for each row, with more one for each token: so there are few tokens then.
    """
    if longest == 1 or tokens > SPLIT_TOKENS:
        return 1
    return max(1, SMALLEST_TILE * shape.num_kv_heads // shape.num_heads)


def _attend_long(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, layer: _Layer, tuning: Tuning
) -> None:
    shape = layer.shape
    group, rows, chosen = shape.num_heads // shape.num_kv_heads, len(batch.context_lens), tuning.prefill
    tiles = prefill.num_tiles(len(query), rows, group, chosen.block_m)
    prefill.attend_tiles[(tiles * shape.num_kv_heads,)](
        out, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, rows, layer.short, shape.scale * LOG2_E, query if layer.sinks is None else layer.sinks,
        **_geometry(query, cache, layer), SEGMENT=tuning.segment,
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps, num_stages=chosen.num_stages)


def _attend_short(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, layer: _Layer, tuning: Tuning
) -> None:
    shape = layer.shape
    heads, kv_heads, rows, chosen = shape.num_heads, shape.num_kv_heads, len(batch.context_lens), tuning.decode
    geometry = _geometry(query, cache, layer) | {"SEGMENT": tuning.segment}
    short, places = layer.short, rows if layer.short == 1 else len(query)
    packed = max(SMALLEST_TILE, triton.next_power_of_2(short * heads // kv_heads))
    visible = shape.window + short - 1 if shape.window else batch.max_context_len
    room = decode.num_segments(batch.max_context_len, visible, tuning.segment)
    partials = query.new_empty(places, heads, room, shape.head_dim, dtype=torch.float32)
    states = query.new_empty(places, heads, room, 2, dtype=torch.float32)
    decode.attend_segments[(rows, kv_heads, decode.num_programs(rows, kv_heads, room))](
        partials, states, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, short, shape.scale * LOG2_E, room, query if layer.sinks is None else layer.sinks,
        **geometry, BLOCK_M=packed, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages)
    decode.combine_segments[(rows, heads, short)](
        out, partials, states, batch.query_starts, batch.context_lens, room, short, HEADS=heads,
        HEAD_DIM=shape.head_dim, BLOCK_D=geometry["BLOCK_D"], WINDOW=shape.window, SEGMENT=tuning.segment, num_warps=2)


def _geometry(query: Tensor, cache: CudaCache, layer: _Layer) -> dict[str, Any]:
    """The compile-time constants of a layer's kernels."""
    shape = layer.shape
    return {
        "KV_HEADS": shape.num_kv_heads, "GROUP": shape.num_heads // shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim, "BLOCK_D": max(SMALLEST_TILE, triton.next_power_of_2(shape.head_dim)),
        "BLOCK_SIZE": cache.block_size, "WINDOW": shape.window, "OPERAND": OPERANDS[query.dtype],
        "SOFT_CAP": shape.soft_cap * LOG2_E, "SINKS": layer.sinks is not None,
    }

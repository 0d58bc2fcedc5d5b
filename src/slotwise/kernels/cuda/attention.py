"""Which attention kernels a step starts, and with what grid.  Nothing here waits for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.kernels.base import AttentionShape, RaggedBatch
from slotwise.kernels.cuda import decode, prefill
from slotwise.kernels.cuda.cache import CudaCache
from slotwise.kernels.cuda.configs import Tuning
from slotwise.kernels.cuda.tile import INTERPRETED

LOG2_E = math.log2(math.e)
SMALLEST_TILE = 16  # rows of the smallest product

_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def attend(query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, tuning: Tuning) -> Tensor:
    """Causal attention of every row over its own cached context: `[tokens, heads * head_dim]`.

    A row's new tokens, times the query heads of a key head, fit into one small tile or they do not: rows that fit are
    split along their context (`decode.py`), the others are cut into tiles of queries (`prefill.py`).
    """
    query = query.contiguous()
    out = torch.empty_like(query)
    if len(query):
        group = shape.num_heads // shape.num_kv_heads
        if batch.max_query_len * group > _short(group):
            _attend_long(out, query, cache, batch, shape, tuning)
        if len(query) < len(batch.context_lens) * batch.max_query_len or batch.max_query_len * group <= _short(group):
            _attend_short(out, query, cache, batch, shape, tuning)
    return out.flatten(1)


def _short(group: int) -> int:
    """Packed queries that one tile of the decode kernel takes."""
    return max(SMALLEST_TILE, triton.next_power_of_2(group))


def _attend_long(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, tuning: Tuning
) -> None:
    group, rows, chosen = shape.num_heads // shape.num_kv_heads, len(batch.context_lens), tuning.prefill
    tiles = prefill.num_tiles(len(query), rows, group, chosen.block_m)
    prefill.attend_tiles[(tiles * shape.num_kv_heads,)](
        out, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, rows, shape.scale * LOG2_E, SHORT=_short(group), **_geometry(query, cache, shape),
        BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps, num_stages=chosen.num_stages)


def _attend_short(
    out: Tensor, query: Tensor, cache: CudaCache, batch: RaggedBatch, shape: AttentionShape, tuning: Tuning
) -> None:
    heads, kv_heads, rows, chosen = shape.num_heads, shape.num_kv_heads, len(batch.context_lens), tuning.decode
    group, geometry = heads // kv_heads, _geometry(query, cache, shape)
    short = _short(group)
    tokens = min(batch.max_query_len, short // group)
    room = decode.num_splits(batch.max_context_len, chosen.min_split, chosen.max_splits)
    partials = query.new_empty(rows, tokens, heads, room, shape.head_dim, dtype=torch.float32)
    logs = query.new_empty(rows, tokens, heads, room, dtype=torch.float32)
    cuts = {"MIN_SPLIT": chosen.min_split, "MAX_SPLITS": chosen.max_splits, "BLOCK_M": short}
    decode.attend_splits[(rows, kv_heads, decode.num_programs(rows, kv_heads, room))](
        partials, logs, query, cache.storage, batch.block_tables, batch.block_tables.stride(0), batch.query_starts,
        batch.context_lens, shape.scale * LOG2_E, room, tokens, **geometry, **cuts, BLOCK_N=chosen.block_n,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages)
    decode.combine_splits[(rows, heads, tokens)](
        out, partials, logs, batch.query_starts, batch.context_lens, room, tokens, HEADS=heads, GROUP=group,
        HEAD_DIM=shape.head_dim, BLOCK_D=geometry["BLOCK_D"], WINDOW=shape.window, **cuts, num_warps=2)


def _geometry(query: Tensor, cache: CudaCache, shape: AttentionShape) -> dict[str, Any]:
    """What a layer's kernels are compiled for."""
    # The interpreter multiplies the bits of bfloat16 instead of its values.
    operand = tl.float32 if INTERPRETED else _OPERANDS[query.dtype]
    return {
        "KV_HEADS": shape.num_kv_heads, "GROUP": shape.num_heads // shape.num_kv_heads, "HEAD_DIM": shape.head_dim,
        "BLOCK_D": max(SMALLEST_TILE, triton.next_power_of_2(shape.head_dim)), "BLOCK_SIZE": cache.block_size,
        "WINDOW": shape.window, "OPERAND": operand,
    }

"""The rotary embedding: everything between a layer's first product and its attention, in one pass.

A program computes some heads of one token: queries are normed, rotated and written out; keys are normed, rotated and
written to the cache; values are written to the cache unchanged.  The index of a head says which of the three it is:

    qkv of a token    [ q0 q1 ... | k0 k1 ... | v0 v1 ... ]     head 0 ... heads + 2 * kv_heads - 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotwise.compute.kernels.cuda.attention import CudaCache
from slotwise.compute.kernels.cuda.jit import jit, jit_varying
from slotwise.compute.kernels.cuda.pointwise import rms_norm
from slotwise.compute.kernels.interface import FP8_LARGEST, AttentionShape, QKNorm, RaggedBatch

HEADS_A_PROGRAM = 8


def rotary_store(
    qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: CudaCache, shape: AttentionShape, norm: QKNorm | None
) -> Tensor:
    """Split, norm and rotate; keys and values go to `batch.slot_mapping`; queries `[tokens, heads, head_dim]`."""
    qkv = qkv.contiguous()
    tokens, half = len(qkv), shape.head_dim // 2
    query = qkv.new_empty(tokens, shape.num_heads, shape.head_dim)
    if not tokens:
        return query
    if norm is not None and (norm.shared is not None or len(norm.query) != shape.head_dim):
        qkv, norm = _normed(qkv, norm), None
    query_weight, key_weight, eps, offset = (
        (norm.query, norm.key, norm.eps, norm.offset) if norm is not None else (qkv, qkv, 0.0, 0.0))
    grid = (tokens, triton.cdiv(shape.num_heads + 2 * shape.num_kv_heads, HEADS_A_PROGRAM))
    _rotary_store[grid](
        query, cache.storage, qkv, rotary, query_weight, key_weight, eps, batch.positions, batch.slot_mapping,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, HALF=half, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_SIZE=cache.block_size, NORM=norm is not None, OFFSET=offset, BLOCK_H=HEADS_A_PROGRAM,
        LARGEST=FP8_LARGEST if cache.storage.itemsize == 1 else None, num_warps=4)
    return query


def _normed(qkv: Tensor, norm: QKNorm) -> Tensor:
    """Queries and keys normed over all heads, and values as they are.  The norms are rounded as stored."""
    queries, keys = len(norm.query), len(norm.key)
    query, key, value = qkv.split([queries, keys, qkv.shape[1] - queries - keys], dim=1)
    if norm.shared is not None:
        squares = norm.shared.add_up(torch.stack([part.float().square().sum(1) for part in (query, key)], 1))
        return torch.cat([
            *(_scaled(part, squares[:, at] / norm.shared.numbers[at], weight, norm)
              for at, (part, weight) in enumerate(((query, norm.query), (key, norm.key)))), value], 1)
    return torch.cat((rms_norm(query, norm.query, norm.eps, norm.offset),
                      rms_norm(key, norm.key, norm.eps, norm.offset), value), dim=1)


def _scaled(part: Tensor, mean: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """`part [tokens, size]` normed by the mean of the squares of each token's numbers, rounded as stored."""
    return (part.float() * torch.rsqrt(mean + norm.eps)[:, None] * (weight.float() + norm.offset)).to(part.dtype)


@jit_varying(alignments=("positions", "slots"))
def _rotary_store(
    query: tl.tensor, storage: tl.tensor, qkv: tl.tensor, rotary: tl.tensor, query_weight: tl.tensor,
    key_weight: tl.tensor, eps: tl.tensor, positions: tl.tensor, slots: tl.tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_H: tl.constexpr, LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    at = (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + column
    low = tl.load(qkv + at, inside, 0.0).to(tl.float32)
    high = tl.load(qkv + at + HALF, inside, 0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if NORM:
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        of_low = _head_weight(query_weight, key_weight, is_query, column, HALF)
        of_high = _head_weight(query_weight + HALF, key_weight + HALF, is_query, column, HALF)
        turned_low, turned_high = low * factor * (of_low + OFFSET), high * factor * (of_high + OFFSET)
    angle = tl.load(positions + token).to(tl.int64) * (2 * HALF) + column
    cosine = tl.load(rotary + angle, column < HALF, 0.0)
    sine = tl.load(rotary + angle + HALF, column < HALF, 0.0)
    low = tl.where(is_value, low, turned_low * cosine - turned_high * sine)
    high = tl.where(is_value, high, turned_high * cosine + turned_low * sine)
    to_query = query + (token * HEADS + head) * (2 * HALF) + column
    kind = query.dtype.element_ty
    tl.store(to_query, low.to(kind), inside & is_query)
    tl.store(to_query + HALF, high.to(kind), inside & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    # Keys and values of a block are `2 * KV_HEADS` heads in a row, as they are in `qkv`.
    place = (slot // BLOCK_SIZE * (2 * KV_HEADS) + head - HEADS) * BLOCK_SIZE + slot % BLOCK_SIZE
    to_cache = storage + place * (2 * HALF) + column
    if LARGEST is not None:
        low = tl.clamp(low, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        high = tl.clamp(high, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    kind = storage.dtype.element_ty
    tl.store(to_cache, low.to(kind), inside & (head >= HEADS))
    tl.store(to_cache + HALF, high.to(kind), inside & (head >= HEADS))


@jit
def _head_weight(
    query_weight: tl.tensor, key_weight: tl.tensor, is_query: tl.tensor, column: tl.tensor, HALF: tl.constexpr
) -> tl.tensor:
    """The norm's weight for half of each head, `[BLOCK_H, BLOCK_HALF]` float32."""
    of_query = tl.load(query_weight + column, column < HALF, 0.0).to(tl.float32)
    of_key = tl.load(key_weight + column, column < HALF, 0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)

"""The contract in plain torch: slow, short, obviously right.  Every other implementation is held against it.

Arithmetic is float32 whatever the tensors' type, rounded once where a result is stored.  Attention reads only the
cache places a query may see, so what stands in the others never matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.kernels.base import AttentionShape, Linear, QKNorm, RaggedBatch


class PagedCache(NamedTuple):
    """Both tensors are `[blocks, block_size, kv_heads, head_dim]`."""

    keys: Tensor
    values: Tensor


class ReferenceKernels:
    """Plain torch, any float type, any device."""

    name = "reference"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def warm_up(self, kind: torch.dtype) -> None:
        """Plain torch is always ready."""

    def operations_per_second(self, kind: torch.dtype) -> float:
        """Nobody waits for the reference."""
        return float("inf")

    def allocate_cache(self, num_blocks: int, block_size: int, shape: AttentionShape, kind: torch.dtype) -> PagedCache:
        """One layer's zeroed cache of `num_blocks` blocks of `block_size` tokens."""
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        return PagedCache(*(torch.zeros(size, dtype=kind, device=self.device) for _ in range(2)))

    def cache_bytes_per_block(self, block_size: int, shape: AttentionShape, kind: torch.dtype) -> int:
        """Bytes one block takes in one layer, keys and values together."""
        return 2 * block_size * shape.num_kv_heads * shape.head_dim * kind.itemsize

    def cache_pieces(self, cache: PagedCache) -> tuple[Tensor, ...]:
        """Both."""
        return tuple(cache)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """`weight [out, in]` as a product over the last dimension."""
        return lambda x: F.linear(x, weight, bias)

    def head(self, weight: Tensor) -> Linear:
        """A product like any other."""
        return self.linear(weight)

    def linear_bytes(self, outputs: int, depth: int, kind: torch.dtype) -> int:
        """As many as before."""
        return outputs * depth * kind.itemsize

    head_bytes = linear_bytes

    def recording_size(self, rows: int, context: int) -> tuple[int, int]:
        """None."""
        return 0, context

    def record(self, work: Callable[[], Tensor]) -> None:
        """Never: plain torch is not run twice alike."""

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of `table [vocabulary, hidden]`: `[tokens, hidden]`."""
        return table.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019) over the last dimension of `x [tokens, hidden]`."""
        return _rms_norm(x.float(), weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place, then RMSNorm of the sum as stored: `[tokens, hidden]`."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `gate_up [tokens, 2 * intermediate]`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: PagedCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        """Split, norm and rotate; keys and values go to `batch.slot_mapping`; queries `[tokens, heads, head_dim]`."""
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        query, key, value = (
            qkv.view(len(qkv), -1, shape.head_dim).float().split([heads, kv_heads, kv_heads], dim=1)
        )
        if norm is not None:
            query, key = _rms_norm(query, norm.query, norm.eps), _rms_norm(key, norm.key, norm.eps)
        cosine, sine = rotary[batch.positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        cache.keys.flatten(0, 1)[batch.slot_mapping] = _rotate(key, cosine, sine).to(cache.keys.dtype)
        cache.values.flatten(0, 1)[batch.slot_mapping] = value.to(cache.values.dtype)
        return _rotate(query, cosine, sine).to(qkv.dtype)

    def attention(self, query: Tensor, cache: PagedCache, batch: RaggedBatch, shape: AttentionShape) -> Tensor:
        """Causal attention of every row over its own cached context: `[tokens, heads * head_dim]`."""
        out = torch.empty_like(query)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row, context_len in enumerate(contexts):
            rows = slice(starts[row], starts[row + 1])
            out[rows] = _attend_row(query[rows], cache, batch.block_tables[row], context_len, shape)
        return out.flatten(1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding (Su et al., 2021) of `x [tokens, heads, head_dim]`, first half paired with second."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


def _attend_row(query: Tensor, cache: PagedCache, table: Tensor, context_len: int, shape: AttentionShape) -> Tensor:
    """Attention of one row's `query [tokens, heads, head_dim]`, the last tokens of its context."""
    first_query = context_len - len(query)
    first = max(0, first_query - shape.window + 1) if shape.window else 0
    places = torch.arange(first, context_len, device=query.device)
    block_size = cache.keys.shape[1]
    blocks, offsets = table[places // block_size].long(), places % block_size
    group = shape.num_heads // shape.num_kv_heads
    keys = cache.keys[blocks, offsets].float().repeat_interleave(group, dim=1)
    values = cache.values[blocks, offsets].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * shape.scale
    back = torch.arange(first_query, context_len, device=query.device)[:, None] - places
    hidden = (back < 0) | (back >= shape.window) if shape.window else back < 0
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)

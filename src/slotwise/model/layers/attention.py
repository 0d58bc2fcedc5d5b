"""Attention with rotary positions, and its options.

    x ─► q, k, v ─► norm q, k ─► rotate q, k ─► store k, v ─► attend (window, soft cap, sinks) ─► output
         Linear     `─────── one kernel, `queries` ───────'       one kernel, `attend`             Linear

Sizes, window and soft cap are the kernels' `AttentionShape`; biases, norms and sinks are weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.kernels.interface import AttentionShape, LayerCache, QKNorm, RaggedBatch, SharedNorm
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.norm import NormOptions, read_qk_norm
from slotwise.model.layers.rope import Rope
from slotwise.model.layers.share import heads_of
from slotwise.model.layers.source import NO_CUTS, Source
from slotwise.model.stored import WHOLE, Cut


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a family's attention has beside its projections."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormOptions | None = None
    norms_all_heads: bool = False  # together, and not each by itself
    sinks: bool = False  # a score without a value for each head
    qkv_name: str = ""  # of the one weight that holds queries, keys and values; "": there are three


class Attention:
    """The attention called `name` in the checkpoint."""

    def __init__(
        self, source: Source, name: str, shape: AttentionShape, rope: Rope, hidden_size: int,
        options: AttentionOptions = AttentionOptions(),
    ) -> None:
        heads, group = heads_of(shape, source.group), source.group
        self.shape = heads.shape
        self.rope = rope
        self._kernels = source.kernels
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {f"{name}.q_proj": query, f"{name}.k_proj": key, f"{name}.v_proj": key}
        if options.qkv_name:
            parts = {f"{name}.{options.qkv_name}": query + 2 * key}
        order = rope.order(shape.head_dim)
        is_shared, size, output = group.size > 1, shape.head_dim, f"{name}.o_proj"
        self.qkv = Linear(source, parts, hidden_size, bias=options.qkv_bias, order=_of_heads(order, heads.shape),
                          cuts=heads.cuts(parts) if is_shared else NO_CUTS)
        columns = range(heads.query.start * size, heads.query.stop * size)
        self.output = Linear(source, {output: hidden_size}, query, bias=options.output_bias,
                             cuts={output: Cut(columns=columns)} if is_shared else NO_CUTS)
        self._norm = None
        if options.qk_norm:
            sizes = (query, key) if options.norms_all_heads else (shape.head_dim, shape.head_dim)
            is_divided = is_shared and options.norms_all_heads
            norm = read_qk_norm(source, name, sizes, options.qk_norm, heads.norm_cuts if is_divided else (WHOLE, WHOLE))
            self._norm = _ordered(norm, order)
            if is_divided:
                self._norm = replace(self._norm, shared=SharedNorm(group.all_reduce, heads.normed_numbers(group)))
        self._sinks = source.tensor(
            {f"{name}.sinks": (shape.num_heads,)}, {f"{name}.sinks": Cut((heads.query,))} if is_shared else NO_CUTS,
        ).float() if options.sinks else None
        self.bytes = self.qkv.bytes + self.output.bytes
        self.bytes += self._norm.query.nbytes + self._norm.key.nbytes if self._norm else 0
        self.bytes += 0 if self._sinks is None else self._sinks.nbytes

    def queries(self, x: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """Write the keys and values of `x [tokens, hidden]` to the cache; returns queries `[tokens, heads, head_dim]`.

        `rotary` is the table of `rope`, as far as the batch's positions.
        """
        return self._kernels.rotary_store(self.qkv(x), rotary, batch, cache, self.shape, self._norm)

    def attend(self, query: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        """Every row's attention over its context: `[tokens, heads * head_dim]`, the input of `output`."""
        return self._kernels.attention(query, cache, batch, self.shape, self._sinks)


def _of_heads(order: Tensor | None, shape: AttentionShape) -> Tensor | None:
    """The order of a head's dimensions as that of the outputs of queries, keys and values: values keep theirs."""
    if order is None:
        return None
    starts = torch.arange(shape.num_heads + shape.num_kv_heads)[:, None] * shape.head_dim
    rotated, values = (starts + order).flatten(), torch.arange(shape.num_kv_heads * shape.head_dim)
    return torch.cat((rotated, len(rotated) + values))


def _ordered(norm: QKNorm, order: Tensor | None) -> QKNorm:
    """Weights in the order of each head's dimensions."""
    if order is None:
        return norm
    query, key = (weight.view(-1, len(order))[:, order].flatten() for weight in (norm.query, norm.key))
    return replace(norm, query=query, key=key)

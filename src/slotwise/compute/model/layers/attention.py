"""Attention with rotary positions, and its options.

    x ─► q, k, v ─► norm q, k ─► rotate q, k ─► store k, v ─► attend (window, soft cap, sinks) ─► output
         Linear     `────── one kernel, `rotary_store` ───'       one kernel, `attention`          Linear

Sizes, window and soft cap are the kernels' `AttentionShape`; biases, norms and sinks are weights.  Where results are
gated, queries and gates are one weight, head by head: [ q0 | g0 | q1 | g1 | ... ].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import AttentionShape, LayerCache, QKNorm, RaggedBatch, SharedNorm
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, read_qk_norm
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.layers.source import NO_CUTS, WeightSource, heads_of
from slotwise.compute.model.stored_tensors import WHOLE, Cut
from slotwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a family's attention has in addition to its projections."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormOptions | None = None
    norms_all_heads: bool = False  # together, and not each by itself
    sinks: bool = False  # a score without a value for each head
    qkv_name: str = ""  # of a fused weight of queries, keys and values; "": three weights
    is_gated: bool = False  # results are multiplied by the sigmoid of gates
    output_name: str = "o_proj"
    norm_names: tuple[str, str] = ("q_norm", "k_norm")


class StateAdvance(NamedTuple):
    """How a layer's recurrent states advanced, on trial, over the tokens of a step.

    `again(at, batch, cache)` advances them over those at `at [tokens]`, int64, which are the tokens of `batch`.
    """

    layer: int
    again: Callable[[Tensor, RaggedBatch, LayerCache], None]


class LayerStep(NamedTuple):
    """One step, as one layer sees it."""

    layer: int
    batch: RaggedBatch  # with the block tables of the layer's cache group
    cache: LayerCache
    rotary: Mapping[Rope, Tensor]  # tables as far as the batch's positions
    kept: Callable[[Tensor], Tensor]  # the rows of a tensor that a later layer, or the head, reads
    advances: list[StateAdvance]  # receives what is on trial


class Attention:
    """The attention called `name` in the checkpoint."""

    def __init__(
        self, source: WeightSource, name: str, shape: AttentionShape, rope: Rope, hidden_size: int,
        options: AttentionOptions = AttentionOptions(),
    ) -> None:
        heads, group = heads_of(shape, source.group), source.group
        if options.is_gated:
            refuse_parts(source, "gated attention")
        self.shape = heads.shape
        self.ropes = (rope,)
        self._kernels = source.kernels
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        queries = {f"{name}.q_proj": query * 2 if options.is_gated else query}
        parts = queries | {f"{name}.k_proj": key, f"{name}.v_proj": key}
        if options.qkv_name:
            parts = {f"{name}.{options.qkv_name}": query + 2 * key}
        order = rope.order(shape.head_dim)
        is_shared, size, output = group.size > 1, shape.head_dim, f"{name}.{options.output_name}"
        self.qkv = Linear(
            source, parts, hidden_size, bias=options.qkv_bias, cuts=heads.cuts(parts) if is_shared else NO_CUTS,
            order=_of_heads(order, heads.shape, is_gated=options.is_gated))
        self._gate = Linear(source, queries, hidden_size, bias=options.qkv_bias,
                            order=_gates(heads.shape)) if options.is_gated else None
        columns = range(heads.query.start * size, heads.query.stop * size)
        self.output = Linear(source, {output: hidden_size}, query, bias=options.output_bias,
                             cuts={output: Cut(columns=columns)} if is_shared else NO_CUTS)
        self._norm = None
        if options.qk_norm:
            sizes = (query, key) if options.norms_all_heads else (shape.head_dim, shape.head_dim)
            is_divided = is_shared and options.norms_all_heads
            names = [f"{name}.{norm}" for norm in options.norm_names]
            cuts = heads.norm_cuts if is_divided else (WHOLE, WHOLE)
            norm = read_qk_norm(source, names, sizes, options.qk_norm, cuts)
            self._norm = _ordered(norm, order)
            if is_divided:
                self._norm = replace(self._norm, shared=SharedNorm(group.all_reduce, heads.normed_numbers(group)))
        self._sinks = source.tensor(
            {f"{name}.sinks": (shape.num_heads,)}, {f"{name}.sinks": Cut((heads.query,))} if is_shared else NO_CUTS,
        ).float() if options.sinks else None
        self.bytes = self.qkv.bytes + self.output.bytes + (self._gate.bytes if self._gate else 0)
        self.bytes += self._norm.query.nbytes + self._norm.key.nbytes if self._norm else 0
        self.bytes += 0 if self._sinks is None else self._sinks.nbytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        gate = None if self._gate is None else self._gate(x)
        queries = self.store(x, step)
        out = self._kernels.attention(queries, step.cache, step.batch, self.shape, self._sinks)
        if gate is not None:
            out = self._kernels.sigmoid_mul(gate, out)
        return self.output(step.kept(out))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, heads, head_dim]`."""
        table = step.rotary[self.ropes[0]]
        return self._kernels.rotary_store(self.qkv(x), table, step.batch, step.cache, self.shape, self._norm)


def refuse_parts(source: WeightSource, what: str) -> None:
    """Raises CheckpointError where ranks hold parts of layers, or adapters change products, which `what` lacks."""
    if source.group.size > 1:
        raise CheckpointError(f"tensor_parallel_size {source.group.size}: {what} is not divided among ranks: serve "
                              "this model with tensor_parallel_size 1")
    if source.adapters is not None:
        raise CheckpointError(f"enable_lora: adapters are not supported with {what}: serve this model without")


def _of_heads(order: Tensor | None, shape: AttentionShape, *, is_gated: bool) -> Tensor | None:
    """The checkpoint's output at each place of queries, keys and values, where that is not the same.

    `order` is that of a head's dimensions; values keep theirs.
    """
    if order is None and not is_gated:
        return None
    size, heads, key_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    in_place = torch.arange(size)
    order = in_place if order is None else order
    before = (2 if is_gated else 1) * heads * size  # outputs of the weight of queries
    queries = torch.arange(heads)[:, None] * (before // heads) + order
    keys, values = (before + torch.arange(first, first + key_heads)[:, None] * size + dimensions
                    for first, dimensions in ((0, order), (key_heads, in_place)))
    return torch.cat((queries, keys, values)).flatten()


def _gates(shape: AttentionShape) -> Tensor:
    """The outputs of the weight of queries and gates that are gates."""
    return torch.arange(2 * shape.num_heads * shape.head_dim).view(shape.num_heads, 2, -1)[:, 1].flatten()


def _ordered(norm: QKNorm, order: Tensor | None) -> QKNorm:
    """Weights in the order of each head's dimensions."""
    if order is None:
        return norm
    query, key = (weight.view(-1, len(order))[:, order].flatten() for weight in (norm.query, norm.key))
    return replace(norm, query=query, key=key)

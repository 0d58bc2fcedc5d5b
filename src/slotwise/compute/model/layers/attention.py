"""Attention with rotary positions, and its options.

    x ─► q, k, v ─► norm q, k ─► rotate q, k ─► store k, v ─► attend (window, soft cap, sinks) ─► output
         Linear     `────── one kernel, `rotary_store` ───'       one kernel, `attention`          Linear

Sizes, window and soft cap are the kernels' `AttentionShape`; biases, norms and sinks are weights.  Where results are
gated, gates are a weight of their own, or one with the queries, head by head: [ q0 | g0 | q1 | g1 | ... ].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slotwise.compute.kernels.interface import AttentionShape, LayerCache, QKNorm, RaggedBatch, SharedNorm
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import HeadNormOptions, HeadNorms, NormOptions, RMSNorm, read_qk_norm
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, heads_of
from slotwise.compute.model.layers.rope import Rope, rotated
from slotwise.compute.model.stored_tensors import WHOLE, Cut
from slotwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a family's attention has in addition to its projections."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormOptions | QKNorm | None = None  # whose weights are read, or are given
    norms_all_heads: bool = False  # together, and not each by itself
    sinks: str = ""  # the name of a score without a value for each head; "": scores have no sinks
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")  # of the products
    qkv_name: str = ""  # of a fused weight of queries, keys and values; "": three weights
    qkv_groups: int = 1  # of heads in a fused weight: each has its queries, then its keys, then its values
    values_first: bool = False  # in a group, values are before keys
    head_norm: HeadNormOptions | None = None
    is_gated: bool = False  # results are multiplied by the sigmoid of gates
    gate_name: str = ""  # of a weight of gates; "": they are with the queries
    has_head_gates: bool = False  # such a weight has a gate for each head, not for each of its numbers
    has_softplus_gates: bool = False  # results are multiplied by the softplus of gates, not by their sigmoid
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    result_norm: tuple[str, NormOptions] | None = None  # of all heads together, and its name
    biases: Tensor | None = None  # of scores, `[heads, positions]` float32, of the heads of all ranks
    has_values: bool = True  # weights of them; without, `qkv` makes them of the keys
    value_dim: int = 0  # of a head's values, if smaller than keys: they are cached with zeros appended; 0: that of keys
    value_scale: float = 1.0  # factor of values
    # What is rotated and stored in place of queries, keys and values `[tokens, heads + 2 * kv_heads, head_dim]`.
    qkv: Callable[[Tensor], Tensor] | None = None
    # What attends in place of the rotated queries `[tokens, heads, head_dim]` of tokens at positions `[tokens]`.
    queries: Callable[[Tensor, Tensor], Tensor] | None = None


PLAIN = AttentionOptions()


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
    # The rows of a tensor that a later layer, or the head, reads.  The first call drops the others of the stream, too.
    kept: Callable[[Tensor], Tensor]
    advances: list[StateAdvance]  # receives what is on trial
    beside: LayerStep | None = None  # the step as the second cache of a layer with two sees it


class Attention:
    """The attention called `name` in the checkpoint."""

    def __init__(
        self, source: WeightSource, name: str, shape: AttentionShape, rope: Rope, hidden_size: int,
        options: AttentionOptions = AttentionOptions(),
    ) -> None:
        heads, group = heads_of(shape, source.group), source.group
        is_gated = options.is_gated and not options.gate_name  # with the queries
        if is_gated:
            refuse_ranks(source, "gated attention")
        self.shape = heads.shape
        self.ropes = (rope,)
        self._kernels = source.kernels
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        q_name, k_name, v_name, output = (f"{name}.{each}" for each in options.names)
        queries = {q_name: query * 2 if is_gated else query}
        value_dim = options.value_dim or shape.head_dim
        self._smaller = None if value_dim == shape.head_dim and options.value_scale == 1 else _SmallerValues(
            heads.shape, value_dim, options.value_scale)
        parts = queries | {k_name: key} | ({v_name: shape.num_kv_heads * value_dim} if options.has_values else {})
        if options.qkv_name:
            parts = {f"{name}.{options.qkv_name}": query + 2 * key}
        order = rope.order(shape.head_dim)
        is_shared, size = group.size > 1, shape.head_dim
        is_cut = is_shared or options.qkv_groups > 1 or options.values_first
        cuts = heads.cuts(parts, options.qkv_groups, values_first=options.values_first) if is_cut else NO_CUTS
        if is_cut and value_dim != size:
            cuts = {**cuts, v_name: Cut((range(heads.key.start * value_dim, heads.key.stop * value_dim),))}
        self.qkv = Linear(source, parts, hidden_size, bias=options.qkv_bias, cuts=cuts,
                          order=_of_heads(order, heads.shape, value_dim, is_gated=is_gated))
        columns = range(heads.query.start * size, heads.query.stop * size)
        self._gate = None
        if options.gate_name:
            gate = f"{name}.{options.gate_name}"
            outputs, rows = (shape.num_heads, heads.query) if options.has_head_gates else (query, columns)
            self._gate = Linear(source, {gate: outputs}, hidden_size,
                                cuts={gate: Cut((rows,))} if is_shared else NO_CUTS)
        elif is_gated:
            self._gate = Linear(source, queries, hidden_size, bias=options.qkv_bias, order=_gates(heads.shape))
        self.output = Linear(source, {output: hidden_size}, shape.num_heads * value_dim, bias=options.output_bias,
                             cuts={output: Cut(columns=range(heads.query.start * value_dim,
                                                             heads.query.stop * value_dim))} if is_shared else NO_CUTS)
        self._norm: QKNorm | None = None
        self._gated: Callable[[Tensor, Tensor], Tensor] | None = None
        if options.has_head_gates or options.has_softplus_gates:
            activation = torch.nn.functional.softplus if options.has_softplus_gates else torch.sigmoid
            self._gated = functools.partial(_gated, activation)
        self._qkv = options.qkv
        self._queries = options.queries
        self._biases: Tensor | None = None
        if options.biases is not None:
            own = options.biases[heads.query.start : heads.query.stop].contiguous()
            self._biases = own.to(source.kernels.device)
        if isinstance(options.qk_norm, QKNorm):
            self._norm = _ordered(options.qk_norm, order)
        elif options.qk_norm:
            sizes = (query, key) if options.norms_all_heads else (shape.head_dim, shape.head_dim)
            is_divided = is_shared and options.norms_all_heads
            names = [f"{name}.{norm}" for norm in options.norm_names]
            norm_cuts = heads.norm_cuts if is_divided else (WHOLE, WHOLE)
            norm = read_qk_norm(source, names, sizes, options.qk_norm, norm_cuts)
            self._norm = _ordered(norm, order)
            if is_divided:
                self._norm = replace(self._norm, shared=SharedNorm(group.all_reduce, heads.normed_numbers(group)))
        self._head_norms = None if options.head_norm is None else HeadNorms(
            source, name, options.head_norm, (heads.query, heads.key), (shape.num_heads, shape.num_kv_heads), size,
            order)
        self._sinks = source.tensor(
            {f"{name}.{options.sinks}": (shape.num_heads,)},
            {f"{name}.{options.sinks}": Cut((heads.query,))} if is_shared else NO_CUTS,
        ).float() if options.sinks else None
        self.bytes = self.qkv.bytes + self.output.bytes + (self._gate.bytes if self._gate else 0)
        has_weights = isinstance(options.qk_norm, NormOptions) and options.qk_norm.has_weight
        self.bytes += self._norm.query.nbytes + self._norm.key.nbytes if self._norm and has_weights else 0
        self.bytes += 0 if self._sinks is None else self._sinks.nbytes
        self.bytes += 0 if self._head_norms is None else self._head_norms.bytes
        self._result_norm = None
        if options.result_norm is not None:
            part, norms = options.result_norm
            self._result_norm = RMSNorm(source, f"{name}.{part}", query, norms)
            self.bytes += self._result_norm.bytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        gate = None if self._gate is None else self._gate(x)
        queries = self.store(x, step)
        if self._queries is not None:
            queries = self._kernels.rowwise(self._queries, queries, step.batch.positions)
        out = self._kernels.attention(queries, step.cache, step.batch, self.shape, self._sinks, self._biases)
        if gate is not None:
            out = self._kernels.sigmoid_mul(gate, out) if self._gated is None else self._kernels.rowwise(
                self._gated, gate, out)
        if self._smaller is not None:
            out = self._kernels.rowwise(self._smaller.without_zeros, out)
        kept = step.kept(out)
        return self.output(kept if self._result_norm is None else self._result_norm(kept))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Write keys and values to the cache; returns the queries `[tokens, heads, head_dim]`."""
        table, qkv = step.rotary[self.ropes[0]], self.qkv(x)
        if self._smaller is not None:
            qkv = self._kernels.rowwise(self._smaller.with_zeros, qkv)
        if self._head_norms is not None:
            qkv = self._head_norms(qkv)
        if self._qkv is not None:
            heads = self._kernels.rowwise(self._qkv, qkv.view(len(qkv), -1, self.shape.head_dim))
            qkv = heads.view(len(qkv), -1)
        return self._kernels.rotary_store(qkv, table, step.batch, step.cache, self.shape, self._norm)


@dataclass(frozen=True, slots=True)
class _SmallerValues:
    """Values that are smaller than keys, and are padded to the size of keys in the cache."""

    shape: AttentionShape
    size: int
    scale: float

    def with_zeros(self, qkv: Tensor) -> Tensor:
        """`[tokens, queries | keys | values]`, with zeros appended to the values of each head."""
        shape = self.shape
        before, values = qkv.split(
            [(shape.num_heads + shape.num_kv_heads) * shape.head_dim, shape.num_kv_heads * self.size], dim=1)
        values = values.view(len(qkv), shape.num_kv_heads, self.size) * self.scale
        return torch.cat((before, pad(values, (0, shape.head_dim - self.size)).flatten(1)), dim=1)

    def without_zeros(self, out: Tensor) -> Tensor:
        """`[tokens, heads * head_dim] -> [tokens, heads * size]`."""
        return out.view(len(out), -1, self.shape.head_dim)[:, :, : self.size].flatten(1)


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, out: Tensor) -> Tensor:
    """Results `[tokens, heads * head_dim]` times those of gates, one for each number or for each head.

    In float64, in which a result does not depend on its place in a vector of the processor.
    """
    factors = activation(gate.double()).to(out.dtype)
    return (out.view(len(out), gate.shape[1], -1) * factors.unsqueeze(2)).flatten(1)


class SharedAttention:
    """Attention with queries only, over the keys and values of an earlier layer (Brandon et al., "Reducing Transformer
    Key-Value Cache Size with Cross-Layer Attention", 2024).

    Args:
        norm: of each head's query.
    """

    def __init__(
        self, source: WeightSource, name: str, shape: AttentionShape, rope: Rope, hidden_size: int, norm: NormOptions,
        *, bias: bool = False,
    ) -> None:
        heads, size, query = heads_of(shape, source.group), shape.head_dim, shape.num_heads * shape.head_dim
        is_shared, own = source.group.size > 1, range(heads.query.start * size, heads.query.stop * size)
        self.shape, self.ropes = heads.shape, (rope,)
        self._kernels = source.kernels
        queries, output = f"{name}.q_proj", f"{name}.o_proj"
        self.queries = Linear(source, {queries: query}, hidden_size, bias=bias,
                              cuts={queries: Cut((own,))} if is_shared else NO_CUTS)
        self.output = Linear(source, {output: hidden_size}, query, bias=bias,
                             cuts={output: Cut(columns=own)} if is_shared else NO_CUTS)
        self._norm = RMSNorm(source, f"{name}.q_norm", size, norm)
        self.bytes = self.queries.bytes + self.output.bytes + self._norm.bytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        heads, size = self.shape.num_heads, self.shape.head_dim
        queries = self._norm(self.queries(x).view(-1, size)).view(-1, heads, size)
        queries = self._kernels.rowwise(
            functools.partial(rotated, step.rotary[self.ropes[0]]), queries, step.batch.positions)
        return self.output(step.kept(self._kernels.attention(queries, step.cache, step.batch, self.shape)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Stores nothing: later tokens read the earlier layer's."""
        return x


def refuse_ranks(source: WeightSource, what: str) -> None:
    """Raises CheckpointError where ranks hold parts of layers, which `what` lacks."""
    if source.group.size > 1:
        raise CheckpointError(f"tensor_parallel_size {source.group.size}: {what} is not divided among ranks: serve "
                              "this model with tensor_parallel_size 1")


def refuse_parts(source: WeightSource, what: str) -> None:
    """Raises CheckpointError where ranks hold parts of layers, or adapters change products, which `what` lacks."""
    refuse_ranks(source, what)
    if source.adapters is not None:
        raise CheckpointError(f"enable_lora: adapters are not supported with {what}: serve this model without")


def _of_heads(order: Tensor | None, shape: AttentionShape, value_dim: int, *, is_gated: bool) -> Tensor | None:
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
    keys = before + torch.arange(key_heads)[:, None] * size + order
    values = before + key_heads * size + torch.arange(key_heads * value_dim)
    return torch.cat((queries.flatten(), keys.flatten(), values))


def _gates(shape: AttentionShape) -> Tensor:
    """The outputs of the weight of queries and gates that are gates."""
    return torch.arange(2 * shape.num_heads * shape.head_dim).view(shape.num_heads, 2, -1)[:, 1].flatten()


def _ordered(norm: QKNorm, order: Tensor | None) -> QKNorm:
    """Weights in the order of each head's dimensions."""
    if order is None:
        return norm
    query, key = (weight.view(-1, len(order))[:, order].flatten() for weight in (norm.query, norm.key))
    return replace(norm, query=query, key=key)

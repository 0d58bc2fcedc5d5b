"""Kernels that check shapes, types and devices of their arguments before a pointer is read.

They are for changes to the runner, the model or kernels: what would otherwise be a wrong token or a broken device is an
error here that names the tensor.  Only metadata is checked, so nothing waits for the device, and steps can be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import (
    Activation,
    AttentionShape,
    ClampedSwiGLU,
    ConvolutionShape,
    ConvolutionWeights,
    DeltaShape,
    DeltaWeights,
    ExpertActivation,
    ExpertWeights,
    Kernels,
    LatentNorm,
    LatentShape,
    LayerCache,
    LayerNormWeights,
    Linear,
    Mixture,
    PackedLatentProducts,
    QKNorm,
    RaggedBatch,
    Routing,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
    StateShape,
    StateSpaceShape,
    StateSpaceWeights,
)
from slotwise.compute.kernels.matrix import QuantizedMatrix, Weight

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class KernelArgumentError(ValueError):
    """A kernel's argument breaks the contract of `compute/kernels/interface.py`."""


class CheckedKernels:
    """Wraps any kernels; checks their results as well."""

    def __init__(self, kernels: Kernels) -> None:
        self.name = kernels.name
        self.device = kernels.device
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods without tensors."""
        return getattr(self._kernels, name)

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """A product that checks its argument."""
        pack = functools.partial(self._kernels.linear, activation=activation)
        return self._product(pack, "linear", weight, bias, weight.shape[0])

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """A product that checks its argument."""
        pack = functools.partial(self._kernels.gated, activation=activation)
        return self._product(pack, "gated", weight, bias, weight.shape[0] // 2)

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """A product that checks its argument."""
        return self._product(
            self._kernels.head, "head", weight, bias, weight.shape[0], self._kernels.wide_kind)

    def embedding(self, table: QuantizedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """A lookup that checks its argument."""
        look_up = self._kernels.embedding(table, kind, scale)

        def checked(token_ids: Tensor) -> Tensor:
            self._check("embedding: token_ids", token_ids, (len(token_ids),), (torch.int64,))
            return self._check("embedding: result", look_up(token_ids), (len(token_ids), table.depth), (kind,))

        return checked

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A product that checks its argument."""
        def pack(plain: Weight, own: Tensor | None) -> Linear:
            assert isinstance(plain, Tensor)
            return self._kernels.exact_linear(plain, own)

        return self._product(pack, "exact_linear", weight, bias, len(weight))

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """A mixture that checks its arguments."""
        if not 0 < routing.top_k <= routing.num_experts:
            raise KernelArgumentError(f"experts: {routing.top_k} of {routing.num_experts} experts")
        self._check("experts: ends", ends, (routing.num_experts,), (torch.int64,))
        mixture = self._kernels.experts(weights, routing, activation, ends)

        def checked(x: Tensor, logits: Tensor) -> Tensor:
            self._check("experts: x", x, tuple(x.shape[:2]), FLOATS)
            self._check("experts: logits", logits, (len(x), routing.num_experts), (x.dtype,))
            return self._check("experts: result", mixture(x, logits), x.shape, (x.dtype,))

        return checked

    def _product(
        self, pack: Callable[[Weight, Tensor | None], Linear], name: str, weight: Weight, bias: Tensor | None,
        made: int, kind_made: Callable[[torch.dtype], torch.dtype] = lambda kind: kind,
    ) -> Linear:
        """A product that checks its argument.

        `made` is the number of numbers per token in the result, `kind_made` their type by that of the argument.
        """
        outputs, depth = weight.shape
        kinds = (weight.dtype,) if isinstance(weight, Tensor) else self._kernels.kinds
        if isinstance(weight, Tensor):
            self._check(f"{name} weight", weight, (outputs, depth), FLOATS)
        if bias is not None:
            self._check(f"{name} bias", bias, (outputs,), kinds)
        product = pack(weight, bias)

        def checked(x: Tensor) -> Tensor:
            self._check(f"{name} of {outputs} x {depth}: x", x, (len(x), depth), kinds)
            return self._check(f"{name}: result", product(x), (len(x), made), (kind_made(x.dtype),))

        return checked

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        self._check("embed: table", table, tuple(table.shape[:2]), FLOATS)
        self._check("embed: token_ids", token_ids, (len(token_ids),), (torch.int64,))
        size = (len(token_ids), table.shape[1])
        return self._check("embed: result", self._kernels.embed(table, token_ids, first), size, (table.dtype,))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        self._check_norm("rms_norm", x, weight)
        result = self._kernels.rms_norm(x, weight, eps, offset)
        return self._check("rms_norm: result", result, x.shape, (weight.dtype,))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        self._check_norm("add_rms_norm", x, weight)
        self._check_residual("add_rms_norm", x, residual)
        result = self._kernels.add_rms_norm(x, residual, weight, eps, offset)
        return self._check("add_rms_norm: result", result, x.shape, (x.dtype,))

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        self._check("layer_norm: x", x, tuple(x.shape[:2]), FLOATS)
        for name, part in (("weight", norm.weight), ("bias", norm.bias)):
            if part is not None:
                self._check(f"layer_norm: {name}", part, (x.shape[-1],), self._normed_kinds(x))
        if residual is not None:
            self._check_residual("layer_norm", x, residual)
        result = self._kernels.layer_norm(x, norm, residual)
        return self._check("layer_norm: result", result, x.shape, self._normed_kinds(x))

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        self._check("add: x", x, tuple(x.shape[:2]), FLOATS)
        self._check_residual("add", x, residual)
        if gate is not None:
            self._check("add: gate", gate, (len(x), 1), (x.dtype,))
        return self._check("add: result", self._kernels.add(x, residual, gate), x.shape, (residual.dtype,))

    def convert(self, x: Tensor, kind: torch.dtype) -> Tensor:
        self._check("convert: x", x, tuple(x.shape[:2]), FLOATS)
        return self._check("convert: result", self._kernels.convert(x, kind), x.shape, (kind,))

    def _check_residual(self, name: str, x: Tensor, residual: Tensor) -> None:
        self._check(f"{name}: residual", residual, x.shape, (x.dtype, self._kernels.wide_kind(x.dtype)))

    def _normed_kinds(self, x: Tensor) -> tuple[torch.dtype, ...]:
        """The types that weights and results of norms of `x` may have: its own; the model's, if `x` is the stream."""
        return tuple([kind for kind in self._kernels.kinds if x.dtype in (kind, self._kernels.wide_kind(kind))])

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._activated("silu_mul", self._kernels.silu_mul, gate_up)

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        self._check("sigmoid_mul: x", x, tuple(x.shape[:2]), FLOATS)
        self._check("sigmoid_mul: gate", gate, x.shape, (x.dtype,))
        return self._check("sigmoid_mul: result", self._kernels.sigmoid_mul(gate, x), x.shape, (x.dtype,))

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: ConvolutionShape,
    ) -> Tensor:
        self.check_batch(batch)
        tokens = len(batch.token_ids)
        self._check("gated_convolution: bcx", bcx, (tokens, 3 * shape.size), FLOATS)
        self._check_convolution("gated_convolution", weights, shape)
        result = self._kernels.gated_convolution(bcx, weights, cache, batch, shape)
        return self._check("gated_convolution: result", result, (tokens, shape.size), (bcx.dtype,))

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        self.check_batch(batch)
        size = len(batch.token_ids), shape.size
        self._check("silu_convolution: x", x, size, FLOATS)
        self._check_convolution("silu_convolution", weights, shape)
        result = self._kernels.silu_convolution(x, weights, cache, batch, shape)
        return self._check("silu_convolution: result", result, size, (x.dtype,))

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: LayerCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        self.check_batch(batch)
        tokens, kinds = len(batch.token_ids), (inputs.x.dtype,)
        shared = shape.num_groups * shape.state_size
        for name, width in zip(inputs._fields, (shape.size, shape.size, shared, shared, shape.size), strict=True):
            self._check(f"selective_scan: {name}", getattr(inputs, name), (tokens, width), kinds)
        floats = (torch.float32,)
        self._check("selective_scan: rate", weights.rate, (shape.state_size, shape.size), floats)
        self._check("selective_scan: skip", weights.skip, (shape.size,), floats)
        result = self._kernels.selective_scan(inputs, weights, cache, batch, shape)
        return self._check("selective_scan: result", result, (tokens, shape.size), kinds)

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: LayerCache, batch: RaggedBatch, shape: StateSpaceShape,
    ) -> Tensor:
        self.check_batch(batch)
        tokens, heads = len(batch.token_ids), shape.num_heads
        self._check("state_space: mixed", mixed, (tokens, shape.values + shape.channels + heads), FLOATS)
        self._check_convolution("state_space", weights.convolution, shape)
        for name in ("rate", "step_bias", "skip"):
            self._check(f"state_space: {name}", getattr(weights, name), (heads,), (torch.float32,))
        if weights.norm is not None:
            self._check("state_space: norm", weights.norm, (shape.values,), (torch.float32,))
        result = self._kernels.state_space(mixed, weights, cache, batch, shape)
        return self._check("state_space: result", result, (tokens, shape.values), (mixed.dtype,))

    def _check_convolution(self, name: str, weights: ConvolutionWeights, shape: StateShape) -> None:
        self._check(f"{name}: taps", weights.taps, (shape.taps, shape.channels), (torch.float32,))
        if weights.bias is not None:
            self._check(f"{name}: bias", weights.bias, (shape.channels,), (torch.float32,))

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: LayerCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        self.check_batch(batch)
        tokens, heads = len(batch.token_ids), shape.num_value_heads
        self._check("gated_delta: mixed", mixed, (tokens, shape.channels + shape.values), FLOATS)
        self._check("gated_delta: gates", gates, (tokens, heads + shape.num_decays), (mixed.dtype,))
        sizes = {"convolution": (shape.taps, shape.channels), "rate": (heads,), "step_bias": (shape.num_decays,),
                 "norm": (shape.value_dim,)}
        for name, size in sizes.items():
            self._check(f"gated_delta: {name}", getattr(weights, name), size, (torch.float32,))
        result = self._kernels.gated_delta(mixed, gates, weights, cache, batch, shape)
        return self._check("gated_delta: result", result, (tokens, shape.values), (mixed.dtype,))

    def latent_products(self, key_up: Tensor, value_up: Tensor) -> PackedLatentProducts:
        heads, nope, rank = key_up.shape
        self._check("latent_products: key_up", key_up, (heads, nope, rank), FLOATS)
        self._check("latent_products: value_up", value_up, (heads, value_up.shape[1], rank), (key_up.dtype,))
        return self._kernels.latent_products(key_up, value_up)

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        self.check_batch(batch)
        tokens = len(batch.token_ids)
        size = (tokens, shape.num_heads * shape.query_dim)
        self._check("latent_store: query", query, size, FLOATS)
        self._check("latent_store: compressed", compressed, (tokens, shape.width), (query.dtype,))
        self._check("latent_store: rotary", rotary, (len(rotary), shape.rope_dim), (torch.float32,))
        self._check("latent_store: norm", norm.weight, (shape.rank,), (torch.float32,))
        rotated = self._kernels.latent_store(query, compressed, rotary, batch, cache, shape, norm)
        return self._check("latent_store: result", rotated, size, (query.dtype,))

    def latent_attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: LatentShape, products: PackedLatentProducts,
    ) -> Tensor:
        tokens = len(batch.token_ids)
        self._check("latent_attention: query", query, (tokens, shape.num_heads * shape.query_dim), FLOATS)
        result = self._kernels.latent_attention(query, cache, batch, shape, products)
        return self._check("latent_attention: result", result, (tokens, shape.num_heads * shape.value_dim),
                           (query.dtype,))

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._activated("gelu_mul", self._kernels.gelu_mul, gate_up)

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        run = functools.partial(self._kernels.activate, activation=activation, is_gated=is_gated)
        if is_gated:
            return self._activated("activate", run, x)
        self._check("activate: x", x, tuple(x.shape[:2]), FLOATS)
        return self._check("activate: result", run(x), x.shape, (x.dtype,))

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        multiply = functools.partial(self._kernels.clamped_swiglu, activation=activation)
        return self._activated("clamped_swiglu", multiply, gate_up)

    def _activated(self, name: str, multiply: Linear, gate_up: Tensor) -> Tensor:
        tokens, both = gate_up.shape
        self._check(f"{name}: gate_up", gate_up, (tokens, both // 2 * 2), FLOATS)
        return self._check(f"{name}: result", multiply(gate_up), (tokens, both // 2), (gate_up.dtype,))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        self._check("soft_cap: x", x, x.shape, FLOATS)
        return self._check("soft_cap: result", self._kernels.soft_cap(x, cap), x.shape, (x.dtype,))

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        self.check_batch(batch)
        tokens, head_dim = len(batch.token_ids), shape.head_dim
        columns = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
        self._check("rotary_store: qkv", qkv, (tokens, columns), FLOATS)
        self._check("rotary_store: rotary", rotary, (len(rotary), head_dim), (torch.float32,))
        for name, weight, heads in (("query", norm.query, shape.num_heads),
                                    ("key", norm.key, shape.num_kv_heads)) if norm else ():
            size = head_dim if len(weight) == head_dim else heads * head_dim
            self._check(f"rotary_store: norm of the {name}", weight, (size,), (qkv.dtype,))
        query = self._kernels.rotary_store(qkv, rotary, batch, cache, shape, norm)
        return self._check("rotary_store: result", query, (tokens, shape.num_heads, head_dim), (qkv.dtype,))

    def attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        size = (len(batch.token_ids), shape.num_heads, shape.head_dim)
        self._check("attention: query", query, size, FLOATS)
        if sinks is not None:
            self._check("attention: sinks", sinks, (shape.num_heads,), (torch.float32,))
        if biases is not None:
            self._check("attention: biases", biases, (shape.num_heads, biases.shape[1]), (torch.float32,))
            positions = (biases.shape[1] + 1) // 2 if shape.has_relative_biases else biases.shape[1]
            if positions < batch.max_context_len or not (shape.has_biases or shape.has_relative_biases):
                raise KernelArgumentError(f"attention: biases of {biases.shape[1]} positions, for a context of "
                                          f"{batch.max_context_len} and has_biases {shape.has_biases}")
        result = self._kernels.attention(query, cache, batch, shape, sinks, biases)
        return self._check("attention: result", result, (size[0], size[1] * size[2]), (query.dtype,))

    def check_batch(self, batch: RaggedBatch) -> None:
        """Raises KernelArgumentError for columns of a step that do not match each other."""
        tokens, rows = len(batch.token_ids), len(batch.context_lens)
        for name in ("token_ids", "positions", "slot_mapping"):
            self._check(f"batch.{name}", getattr(batch, name), (tokens,), (torch.int64,))
        self._check("batch.query_starts", batch.query_starts, (rows + 1,), (torch.int32,))
        self._check("batch.context_lens", batch.context_lens, (rows,), (torch.int32,))
        self._check("batch.block_tables", batch.block_tables, (rows, batch.block_tables.shape[1]), (torch.int32,))
        self._check("batch.sample_at", batch.sample_at, (len(batch.sample_at),), (torch.int64,))
        if batch.on_trial is not None:
            self._check("batch.on_trial", batch.on_trial, (rows,), (torch.int32,))
        if not 0 < batch.max_query_len <= tokens or batch.max_query_len > batch.max_context_len:
            raise KernelArgumentError(
                f"a batch of {tokens} tokens has a row of {batch.max_query_len} and a context of "
                f"{batch.max_context_len}")

    def _check_norm(self, name: str, x: Tensor, weight: Tensor) -> None:
        self._check(f"{name}: x", x, tuple(x.shape[:2]), FLOATS)
        self._check(f"{name}: weight", weight, (x.shape[-1],), (x.dtype,))

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], kinds: tuple[torch.dtype, ...]) -> Tensor:
        if tuple(tensor.shape) != tuple(shape):
            raise KernelArgumentError(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype not in kinds:
            raise KernelArgumentError(f"{name} is {tensor.dtype}, not {' or '.join(map(str, kinds))}")
        if tensor.device.type != self.device.type:
            raise KernelArgumentError(f"{name} is on {tensor.device}, not on {self.device}")
        return tensor

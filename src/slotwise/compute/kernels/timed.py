"""Kernels with timers: the same results, kernel by kernel, and the seconds of each kind of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, dtype

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
    Graph,
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
    StateSpaceShape,
    StateSpaceWeights,
)
from slotwise.compute.kernels.matrix import QuantizedMatrix, Weight

PRODUCTS, ATTENTION, SMALL = "products", "attention", "small operators"


class TimedKernels:
    """Wraps any kernels; measures once `start` was called.  Then nothing is captured, since a graph runs as a whole."""

    def __init__(self, kernels: Kernels) -> None:
        self.name = kernels.name
        self.seconds = {PRODUCTS: 0.0, ATTENTION: 0.0, SMALL: 0.0}
        self._kernels = kernels
        self._keeps_time = False

    def start(self) -> None:
        """Measure from here on."""
        self._keeps_time = True
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods that compute nothing."""
        return getattr(self._kernels, name)

    def record(self, work: Callable[[], Tensor]) -> Graph | None:
        """None while it measures."""
        return None if self._keeps_time else self._kernels.record(work)

    def linear(self, weight: Weight, bias: Tensor | None = None, activation: Activation | None = None) -> Linear:
        """A timed product, any activation included."""
        return self._timed_product(self._kernels.linear(weight, bias, activation))

    def gated(self, weight: Weight, bias: Tensor | None = None, activation: Activation = "silu") -> Linear:
        """A timed product, its activation included."""
        return self._timed_product(self._kernels.gated(weight, bias, activation))

    def exact_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A timed product."""
        return self._timed_product(self._kernels.exact_linear(weight, bias))

    def experts(
        self, weights: Iterable[ExpertWeights], routing: Routing, activation: ExpertActivation, ends: Tensor,
    ) -> Mixture:
        """A timed mixture, counted as products, which take nearly all of its time."""
        mixture = self._kernels.experts(weights, routing, activation, ends)
        return lambda x, logits: self._timed(PRODUCTS, lambda: mixture(x, logits))

    def head(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """A timed product."""
        return self._timed_product(self._kernels.head(weight, bias))

    def embedding(self, table: QuantizedMatrix, kind: dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        """A timed lookup."""
        look_up = self._kernels.embedding(table, kind, scale)
        return lambda token_ids: self._timed(SMALL, lambda: look_up(token_ids))

    def rowwise(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.rowwise(function, *inputs))

    def embed(self, table: Tensor, token_ids: Tensor, first: int | None = None) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.embed(table, token_ids, first))

    def convert(self, x: Tensor, kind: dtype) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.convert(x, kind))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.rms_norm(x, weight, eps, offset))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.add_rms_norm(x, residual, weight, eps, offset))

    def layer_norm(self, x: Tensor, norm: LayerNormWeights, residual: Tensor | None = None) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.layer_norm(x, norm, residual))

    def add(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.add(x, residual, gate))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.silu_mul(gate_up))

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.sigmoid_mul(gate, x))

    def gated_convolution(
        self, bcx: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: ConvolutionShape,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.gated_convolution(bcx, weights, cache, batch, shape))

    def silu_convolution(
        self, x: Tensor, weights: ConvolutionWeights, cache: LayerCache, batch: RaggedBatch, shape: SelectiveShape,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.silu_convolution(x, weights, cache, batch, shape))

    def selective_scan(
        self, inputs: SelectiveInputs, weights: SelectiveWeights, cache: LayerCache, batch: RaggedBatch,
        shape: SelectiveShape,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.selective_scan(inputs, weights, cache, batch, shape))

    def state_space(
        self, mixed: Tensor, weights: StateSpaceWeights, cache: LayerCache, batch: RaggedBatch, shape: StateSpaceShape,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.state_space(mixed, weights, cache, batch, shape))

    def gated_delta(
        self, mixed: Tensor, gates: Tensor, weights: DeltaWeights, cache: LayerCache, batch: RaggedBatch,
        shape: DeltaShape,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.gated_delta(mixed, gates, weights, cache, batch, shape))

    def latent_store(
        self, query: Tensor, compressed: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache,
        shape: LatentShape, norm: LatentNorm,
    ) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.latent_store(
            query, compressed, rotary, batch, cache, shape, norm))

    def latent_attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: LatentShape, products: PackedLatentProducts,
    ) -> Tensor:
        """Timed with the products around it."""
        return self._timed(ATTENTION, lambda: self._kernels.latent_attention(query, cache, batch, shape, products))

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.gelu_mul(gate_up))

    def activate(self, x: Tensor, activation: Activation, *, is_gated: bool = False) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.activate(x, activation, is_gated=is_gated))

    def clamped_swiglu(self, gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.clamped_swiglu(gate_up, activation))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.soft_cap(x, cap))

    def rotary_store(
        self, qkv: Tensor, rotary: Tensor, batch: RaggedBatch, cache: LayerCache, shape: AttentionShape,
        norm: QKNorm | None,
    ) -> Tensor:
        return self._timed(SMALL, lambda: self._kernels.rotary_store(qkv, rotary, batch, cache, shape, norm))

    def attention(
        self, query: Tensor, cache: LayerCache, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        return self._timed(ATTENTION, lambda: self._kernels.attention(query, cache, batch, shape, sinks, biases))

    def warm_up(self, kind: dtype) -> None:
        self._kernels.warm_up(kind)

    def _timed_product(self, product: Linear) -> Linear:
        return lambda x: self._timed(PRODUCTS, lambda: product(x))

    def _timed(self, part: str, work: Callable[[], Tensor]) -> Tensor:
        started = time.perf_counter()
        result = work()
        self.seconds[part] += time.perf_counter() - started
        return result

"""Per-layer embeddings: what each layer adds to the residual stream for the token alone (Gemma 3n, 2025).

    inputs = (table[token] + norm(project(embedding))) / sqrt(2)       [layers, size], once a step
    h += norm(projection(gelu(gate(h)) * inputs[layer]))               in each layer

The table is read row by row, so most of its bytes stay on disk or in slow memory.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.model.layers.embedding_and_head import read_embedding
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource


class PerLayerStream(ResidualStream):
    """The residual stream, and the inputs of every layer, `[tokens, layers * size]`."""

    def __init__(self, x: Tensor, inputs: Tensor, size: int, kernels: Kernels) -> None:
        super().__init__(x, kernels)
        self._inputs, self._size = inputs, size

    def inputs(self, layer: int) -> Tensor:
        """Of one layer, `[tokens, size]`."""
        return self._inputs[:, layer * self._size : (layer + 1) * self._size]

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._inputs = self._inputs.index_select(0, rows)


class PerLayerInputs:
    """`token_ids [tokens], embedding [tokens, hidden] -> [tokens, layers * size]`.

    Args:
        vocab_size: rows of the table; a token beyond it has the first row.
    """

    def __init__(
        self, source: WeightSource, vocab_size: int, sizes: tuple[int, int, int], options: NormOptions,
    ) -> None:
        """`sizes`: of the hidden state, number of layers, and of an input."""
        hidden, layers, self.size = sizes
        self._kernels, self._vocab_size, self._scale = source.kernels, vocab_size, hidden**-0.5
        width = layers * self.size
        self._table = read_embedding(source, "model.embed_tokens_per_layer", (vocab_size, width), self.size**0.5)
        self._projection = Linear(source, {"model.per_layer_model_projection": width}, hidden)
        self._norm = RMSNorm(source, "model.per_layer_projection_norm", self.size, options)
        self.token_bytes = self._projection.bytes + self._norm.bytes
        self.bytes = self._table.bytes + self.token_bytes

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        rowwise = self._kernels.rowwise
        rows = self._table(rowwise(functools.partial(_within, self._vocab_size), token_ids))
        projected = rowwise(functools.partial(torch.mul, other=self._scale), self._projection(x))
        normed = self._norm(projected.view(-1, self.size)).view(rows.shape)
        return rowwise(_mean, normed, rows)


def _within(vocab_size: int, token_ids: Tensor) -> Tensor:
    return torch.where(token_ids < vocab_size, token_ids, 0)


def _mean(one: Tensor, other: Tensor) -> Tensor:
    both: Tensor = (one + other) * 2.0**-0.5
    return both


class PerLayerGate:
    """`x [tokens, hidden], inputs [tokens, size] -> [tokens, hidden]`: what a layer adds to the stream."""

    def __init__(self, source: WeightSource, at: str, sizes: tuple[int, int], options: NormOptions) -> None:
        """`sizes`: of the hidden state and of an input.  `at`: the layer's name."""
        hidden, size = sizes
        self._kernels = source.kernels
        self._gate = Linear(source, {f"{at}.per_layer_input_gate": size}, hidden)
        self._projection = Linear(source, {f"{at}.per_layer_projection": hidden}, size)
        self._norm = RMSNorm(source, f"{at}.post_per_layer_input_norm", hidden, options)
        self.bytes = self._gate.bytes + self._projection.bytes + self._norm.bytes

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        gated = self._kernels.rowwise(_gated, self._gate(x), inputs)
        return self._norm(self._projection(gated))


def _gated(gate: Tensor, inputs: Tensor) -> Tensor:
    """In float64, in which a result does not depend on its place in a vector of the processor."""
    return torch.nn.functional.gelu(gate.double(), approximate="tanh").to(inputs.dtype) * inputs

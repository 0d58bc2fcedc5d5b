"""Mamba's layer (Gu and Dao, 2023) in place of attention: a state of fixed size per row.

    x ─► x, z ─► convolution ─┬─► dt, B, C, normed in some families ─► dt ─► rule and gate by z ─► output
         Linear               │   Linear                               Linear                      Linear
                              └───────────────────────────────────────────►

Convolution and rule are kernels, `silu_convolution` and `selective_scan`.  The state lies in the cache, in a group
whose blocks hold one each (`StateShape` in `compute/kernels/interface.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import (
    LayerCache,
    RaggedBatch,
    SelectiveInputs,
    SelectiveShape,
    SelectiveWeights,
)
from slotwise.compute.model.layers.attention import LayerStep, StateAdvance, refuse_ranks
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.layers.short_convolution import num_bytes, read_convolution

ReadNorm = Callable[[WeightSource, str, int], RMSNorm]
"""Reads the norm of dt, B or C called so, of so many numbers."""


class WeightlessNorm(RMSNorm):
    """`x / rms(x)`, `[tokens, size]`."""

    def __init__(self, source: WeightSource, size: int, options: NormOptions) -> None:
        self._kernels = source.kernels
        self._weight = torch.ones(size, dtype=source.dtype, device=source.kernels.device)
        self._options = options
        self.bytes = 0


class HeadProducts:
    """Products of each head's part of `x`, `[tokens, heads * inputs] -> [tokens, heads * outputs]`, without adapters.

    Args:
        weight: `[heads, outputs, inputs]`.
        bias: `[heads, outputs]`.
    """

    def __init__(self, source: WeightSource, weight: Tensor, bias: Tensor | None = None) -> None:
        self._kernels = source.kernels
        biases = [None] * len(weight) if bias is None else list(bias)
        self._products = [source.kernels.exact_linear(own.contiguous(), added)
                          for own, added in zip(weight, biases, strict=True)]
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rowwise, count = self._kernels.rowwise, len(self._products)
        parts = [product(rowwise(functools.partial(_part, count, head), x))
                 for head, product in enumerate(self._products)]
        return rowwise(_beside, *parts)


def _part(count: int, head: int, x: Tensor) -> Tensor:
    return x.chunk(count, dim=1)[head].contiguous()


def _beside(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


class Mamba:
    """The layer called `name` in the checkpoint.

    Args:
        bias: of the first and the last product.
        convolution_bias: of the convolution.
        norm: reads the norms of dt, B and C; None: they are not normed.
        has_heads: the groups of `shape` are heads, each with products of its own that make its dt, B and C, and the
            first product's outputs alternate between x and z (Zamba).
    """

    ropes: tuple[Rope, ...] = ()
    _parts: Sequence[Linear | HeadProducts]
    _steps: Linear | HeadProducts

    def __init__(
        self, source: WeightSource, name: str, shape: SelectiveShape, hidden_size: int, *, bias: bool = False,
        convolution_bias: bool = True, norm: ReadNorm | None = None, has_heads: bool = False,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels = source.kernels
        size, rank, numbers = shape.size, shape.step_rank, shape.state_size
        self._mixed = Linear(source, {f"{name}.in_proj": 2 * size}, hidden_size, bias=bias,
                             order=torch.arange(2 * size).view(size, 2).T.flatten() if has_heads else None)
        sizes = (rank, numbers, numbers)
        outputs = torch.arange(sum(sizes)).split(sizes)
        self._norms = norm and [norm(source, f"{name}.{part}_layernorm", len(order))
                                for part, order in zip(("dt", "b", "c"), outputs, strict=True)]
        channels: tuple[int, ...] = (size,)
        if has_heads:
            heads, per_head = channels = (shape.num_groups, size // shape.num_groups)
            both = source.tensor({f"{name}.x_proj_weight": (heads, sum(sizes), per_head)})
            self._parts = [HeadProducts(source, weight) for weight in both.split(sizes, dim=1)]
            self._steps = HeadProducts(source, source.tensor({f"{name}.dt_proj_weight": (*channels, rank)}),
                                       source.tensor({f"{name}.dt_proj_bias": channels}))
        else:
            self._parts = [Linear(source, {f"{name}.x_proj": sum(sizes)}, size, order=order, is_exact=True)
                           for order in outputs]
            self._steps = Linear(source, {f"{name}.dt_proj": size}, rank, bias=True)
        self.output = Linear(source, {f"{name}.out_proj": hidden_size}, size, bias=bias)
        self._convolution = read_convolution(source, f"{name}.conv1d", shape, bias=convolution_bias)
        rate = -torch.exp(source.tensor({f"{name}.A_log": (*channels, numbers)}).float()).view(size, numbers)
        skip = source.tensor({f"{name}.D": channels}).float().flatten()
        self._weights = SelectiveWeights(rate.T.contiguous(), skip)
        self.bytes = sum(part.bytes for part in (
            self._mixed, self._steps, self.output, *self._parts, *(self._norms or ())))
        self.bytes += num_bytes(self._convolution) + num_bytes(self._weights)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        return self.output(step.kept(self.store(x, step)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns what they yield, gated, `[tokens, channels]`."""
        mixed = self._mixed(x)  # held to the end: a graph reuses its memory once it is dropped
        x, gate = mixed.chunk(2, dim=1)
        convolved = self._convolve(x, step.batch, step.cache)
        steps, b, c = (part(convolved) for part in self._parts)
        if self._norms:
            steps, b, c = (norm(part) for norm, part in zip(self._norms, (steps, b, c), strict=True))
        inputs = SelectiveInputs(convolved, self._steps(steps), b, c, gate)

        def again(at: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
            self._convolve(x.index_select(0, at), batch, cache)
            self._scan(SelectiveInputs(*[each.index_select(0, at) for each in inputs]), batch, cache)

        if step.batch.on_trial is not None:
            step.advances.append(StateAdvance(step.layer, again))
        return self._scan(inputs, step.batch, step.cache)

    def _convolve(self, x: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        return self._kernels.silu_convolution(x, self._convolution, cache, batch, self.shape)

    def _scan(self, inputs: SelectiveInputs, batch: RaggedBatch, cache: LayerCache) -> Tensor:
        return self._kernels.selective_scan(inputs, self._weights, cache, batch, self.shape)

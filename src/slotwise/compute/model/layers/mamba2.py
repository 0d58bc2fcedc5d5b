"""Mamba-2's layer (Dao and Gu, 2024) in place of attention, or next to it: a state of fixed size per row.

    x ─► z, x, B, C, dt ─► convolution, rule, norm, gate ─► output
         Linear            one kernel, `state_space`        Linear

The state lies in the cache, in a group whose blocks hold one each (`StateShape` in `compute/kernels/interface.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import LayerCache, RaggedBatch, StateSpaceShape, StateSpaceWeights
from slotwise.compute.model.layers.attention import LayerStep, refuse_ranks
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.layers.short_convolution import advanced, num_bytes, read_convolution


class Mamba2:
    """The layer called `name` in the checkpoint.

    Args:
        bias: of the products; `output_bias` of the last one, where it differs.
        convolution_bias: of the convolution.
    """

    ropes: tuple[Rope, ...] = ()

    def __init__(
        self, source: WeightSource, name: str, shape: StateSpaceShape, hidden_size: int, eps: float, *,
        bias: bool = False, output_bias: bool | None = None, convolution_bias: bool = True,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels = source.kernels
        outputs = shape.values + shape.channels + shape.num_heads
        self._mixed = Linear(source, {f"{name}.in_proj": outputs}, hidden_size, bias=bias)
        self.output = Linear(source, {f"{name}.out_proj": hidden_size}, shape.values,
                             bias=bias if output_bias is None else output_bias)
        self._weights = _read_weights(source, name, shape, eps, convolution_bias=convolution_bias)
        self.bytes = self._mixed.bytes + self.output.bytes + num_bytes(self._weights)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        return self.output(step.kept(self.store(x, step)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns what they yield, gated, `[tokens, values]`."""
        def advance(mixed: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
            return self._kernels.state_space(mixed, self._weights, cache, batch, self.shape)

        return advanced(step, self._mixed(x), advance)


def _read_weights(
    source: WeightSource, name: str, shape: StateSpaceShape, eps: float, *, convolution_bias: bool,
) -> StateSpaceWeights:
    def read(part: str, size: int) -> Tensor:
        return source.tensor({f"{name}.{part}": (size,)}).float()

    heads = shape.num_heads
    return StateSpaceWeights(
        read_convolution(source, f"{name}.conv1d", shape, bias=convolution_bias), -torch.exp(read("A_log", heads)),
        read("dt_bias", heads), read("D", heads), read("norm.weight", shape.values) if shape.norm_groups else None, eps)

"""The short convolution of LFM2 (Liquid AI, 2025) in place of attention, between two gates of the input's own.

    x ─► b, c, x ─► b * x ─► convolution ─► times c ─► output
         Linear     `── one kernel, `gated_convolution` ─'   Linear
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slotwise.compute.kernels.interface import ConvolutionShape, ConvolutionWeights, LayerCache, RaggedBatch, StateShape
from slotwise.compute.model.layers.attention import LayerStep, StateAdvance, refuse_ranks
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope


class ShortConvolution:
    """The layer called `name` in the checkpoint."""

    ropes: tuple[Rope, ...] = ()

    def __init__(
        self, source: WeightSource, name: str, shape: ConvolutionShape, hidden_size: int, *, bias: bool = False,
    ) -> None:
        refuse_ranks(source, "a recurrent state")
        self.shape = shape
        self._kernels = source.kernels
        self._bcx = Linear(source, {f"{name}.in_proj": 3 * shape.size}, hidden_size, bias=bias)
        self.output = Linear(source, {f"{name}.out_proj": hidden_size}, shape.size, bias=bias)
        self._weights = read_convolution(source, f"{name}.conv", shape, bias=bias)
        self.bytes = self._bcx.bytes + self.output.bytes + num_bytes(self._weights)

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """`[tokens, hidden] -> [kept tokens, hidden]`."""
        return self.output(step.kept(self.store(x, step)))

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        """Advance the rows' states; returns what is convolved and gated, `[tokens, channels]`."""
        def advance(bcx: Tensor, batch: RaggedBatch, cache: LayerCache) -> Tensor:
            return self._kernels.gated_convolution(bcx, self._weights, cache, batch, self.shape)

        return advanced(step, self._bcx(x), advance)


Advance = Callable[[Tensor, RaggedBatch, LayerCache], Tensor]
"""`advance(inputs, batch, cache)` advances the rows' states over `inputs [tokens, ...]`; returns their results."""


def advanced(step: LayerStep, inputs: Tensor, advance: Advance) -> Tensor:
    """What `advance` returns for a step.  Where states are on trial, notes how to advance them for good."""
    def again(at: Tensor, batch: RaggedBatch, cache: LayerCache) -> None:
        advance(inputs.index_select(0, at), batch, cache)

    if step.batch.on_trial is not None:
        step.advances.append(StateAdvance(step.layer, again))
    return advance(inputs, step.batch, step.cache)


def read_convolution(source: WeightSource, name: str, shape: StateShape, *, bias: bool) -> ConvolutionWeights:
    """The weights of the short convolution called `name`."""
    taps = source.tensor({f"{name}.weight": (shape.channels, 1, shape.taps)}).float()
    own = source.tensor({f"{name}.bias": (shape.channels,)}).float() if bias else None
    return ConvolutionWeights(taps[:, 0].T.contiguous(), own)


def num_bytes(weights: tuple[object, ...]) -> int:
    """Bytes of all tensors among `weights`, and in tuples among them."""
    return sum(each.nbytes if isinstance(each, Tensor) else num_bytes(each) if isinstance(each, tuple) else 0
               for each in weights)

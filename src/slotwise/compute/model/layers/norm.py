"""The residual stream, and RMSNorm (Zhang and Sennrich, 2019), which kernels fuse with the addition before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from slotwise.compute.kernels.interface import Kernels, QKNorm
from slotwise.compute.model.layers.source import NO_CUTS, WeightSource
from slotwise.compute.model.stored_tensors import WHOLE, Cut


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a family's norms compute."""

    eps: float
    offset: float = 0.0  # added to the weight in float32: Gemma's is 1


class ResidualStream:
    """The hidden states `h [tokens, hidden]` that flow through a model: `h += attention(norm(h))`.

    One kernel adds and norms.  So an addend waits for the norm, or the `sum`, that reads the stream next.
    """

    def __init__(self, x: Tensor, kernels: Kernels) -> None:
        self._sum = x  # without the addend; changed in place
        self._addend: Tensor | None = None
        self._kernels = kernels

    def __iadd__(self, x: Tensor) -> Self:
        if self._addend is not None:
            self.sum()
        self._addend = x
        return self

    def sum(self) -> Tensor:
        """The stream as it is.  Valid until the next sum."""
        if self._addend is not None:
            self._sum, self._addend = self._kernels.add(self._addend, self._sum), None
        return self._sum

    def replace(self, x: Tensor) -> None:
        """Go on with `x`, which holds the sum so far."""
        self._sum, self._addend = x, None

    def normed(self, weight: Tensor, eps: float, offset: float) -> Tensor:
        """The RMSNorm of the sum."""
        if self._addend is None:
            return self._kernels.rms_norm(self._sum, weight, eps, offset)
        x, self._addend = self._addend, None
        return self._kernels.add_rms_norm(x, self._sum, weight, eps, offset)

    def keep(self, rows: Tensor) -> None:
        """Keep some rows, int64, and drop the others, which no later layer reads."""
        self._sum = self.sum().index_select(0, rows)


class RMSNorm:
    """`x / rms(x) * (offset + weight)` over the last dimension, `[tokens, size]`."""

    def __init__(self, source: WeightSource, name: str, size: int, options: NormOptions) -> None:
        self._kernels = source.kernels
        self._weight = source.tensor({f"{name}.weight": (size,)})
        self._options = options
        self.bytes = size * source.dtype.itemsize

    def __call__(self, x: Tensor | ResidualStream) -> Tensor:
        if isinstance(x, ResidualStream):
            return x.normed(self._weight, self._options.eps, self._options.offset)
        return self._kernels.rms_norm(x, self._weight, self._options.eps, self._options.offset)


class NoNorm:
    """Stands where a family, or the end of a stage, has no norm: the residual stream itself."""

    bytes = 0

    def __call__(self, h: ResidualStream) -> Tensor:
        return h.sum()


def read_qk_norm(
    source: WeightSource, names: Sequence[str], sizes: tuple[int, int], options: NormOptions,
    cuts: tuple[Cut, Cut] = (WHOLE, WHOLE),
) -> QKNorm:
    """The norms of queries and keys called `names`, with weights of these `sizes`."""
    query, key = (source.tensor({f"{one}.weight": (size,)}, NO_CUTS if cut == WHOLE else {f"{one}.weight": cut})
                  for one, size, cut in zip(names, sizes, cuts, strict=True))
    return QKNorm(query, key, options.eps, options.offset)

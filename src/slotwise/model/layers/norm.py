"""RMSNorm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slotwise.kernels.interface import QKNorm
from slotwise.model.layers.source import NO_CUTS, WeightSource
from slotwise.model.stored_tensors import WHOLE, Cut


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a family's norms compute."""

    eps: float
    offset: float = 0.0  # added to the weight in float32: Gemma's is 1


class RMSNorm:
    """`x / rms(x) * (offset + weight)` over the last dimension, `[tokens, size]`."""

    def __init__(self, source: WeightSource, name: str, size: int, options: NormOptions) -> None:
        self._kernels = source.kernels
        self._weight = source.tensor({f"{name}.weight": (size,)})
        self._options = options
        self.bytes = size * source.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self._weight, self._options.eps, self._options.offset)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place, then the norm of the sum, as one kernel."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._options.eps, self._options.offset)


class NoNorm:
    """Where a family has no norm (OLMo 2): the residual stream itself."""

    bytes = 0

    def __init__(self, source: WeightSource) -> None:
        self._kernels = source.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place; returns `residual`."""
        return self._kernels.add(x, residual)


def read_qk_norm(
    source: WeightSource, name: str, sizes: tuple[int, int], options: NormOptions,
    cuts: tuple[Cut, Cut] = (WHOLE, WHOLE),
) -> QKNorm:
    """The norms of queries and keys, with weights of these `sizes`, of the attention called `name`."""
    names = [f"{name}.{part}_norm.weight" for part in "qk"]
    query, key = (source.tensor({one: (size,)}, NO_CUTS if cut == WHOLE else {one: cut})
                  for one, size, cut in zip(names, sizes, cuts, strict=True))
    return QKNorm(query, key, options.eps, options.offset)

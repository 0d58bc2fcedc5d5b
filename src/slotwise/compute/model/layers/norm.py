"""The residual stream, RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016).

Kernels fuse a norm with the addition before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from slotwise.compute.kernels.interface import Kernels, LayerNormWeights, QKNorm
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource
from slotwise.compute.model.stored_tensors import WHOLE, Cut


class Norm(Protocol):
    """`[tokens, size] -> [tokens, size]`, of a tensor or of the residual stream."""

    bytes: int  # of the weights, as packed

    def __call__(self, h: ResidualStream, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class NormOptions:
    """How a family's RMS norms compute."""

    eps: float
    offset: float = 0.0  # added to the weight in float32: Gemma's is 1
    has_weight: bool = True

    def read(self, source: WeightSource, name: str, size: int) -> RMSNorm:
        """The norm called `name` in the checkpoint."""
        return RMSNorm(source, name, size, self)


@dataclass(frozen=True, slots=True)
class LayerNormOptions:
    """How a family's LayerNorms compute."""

    eps: float
    offset: float = 0.0  # added to the weight in float32: Nemotron's is 1
    has_weight: bool = True
    has_bias: bool = True

    def read(self, source: WeightSource, name: str, size: int) -> LayerNorm:
        """The norm called `name` in the checkpoint."""
        return LayerNorm(source, name, size, self)


class ResidualStream:
    """The hidden states `h [tokens, hidden]` that flow through a model: `h += attention(norm(h))`.

    One kernel adds and norms.  So an addend waits for the norm, or the `sum`, that reads the stream next.

    Args:
        x: initial value, in the model's own type or in a wider one, in which sums are not rounded each time.
        kind: the model's own type; None: that of `x`.
    """

    def __init__(self, x: Tensor, kernels: Kernels, kind: torch.dtype | None = None) -> None:
        self._sum = x  # without the addend; changed in place
        self._addend: Tensor | None = None
        self._kernels, self._kind = kernels, kind or x.dtype

    def __iadd__(self, x: Tensor) -> Self:
        if self._addend is not None:
            self.whole()
        self._addend = x
        return self

    def sum(self) -> Tensor:
        """The stream as it is, in the model's own type.  Valid until the next sum."""
        return self._kernels.convert(self.whole(), self._kind)

    def wide(self) -> Tensor:
        """The stream as it is, in the wider type of its kernels."""
        return self._kernels.convert(self.whole(), self._kernels.wide_kind(self._kind))

    def whole(self) -> Tensor:
        """The stream as it is, in its type.  Valid until the next sum."""
        if self._addend is not None:
            self._sum, self._addend = self._kernels.add(self._addend, self._sum), None
        return self._sum

    def pop_addend(self) -> tuple[Tensor | None, Tensor]:
        """The addend that waits, if any, and the stream, to which the caller's kernel adds it in place."""
        addend, self._addend = self._addend, None
        return addend, self._sum

    def replace(self, x: Tensor) -> None:
        """Continue with `x [tokens, hidden]`, which later sums change in place, instead of the sum."""
        self._sum, self._addend = x, None

    def keep(self, rows: Tensor) -> None:
        """Keep some rows, int64, and drop the others, which no later layer reads."""
        self._sum = self.whole().index_select(0, rows)


class RMSNorm:
    """`x / rms(x) * (offset + weight)` over the last dimension, `[tokens, size]`."""

    def __init__(self, source: WeightSource, name: str, size: int, options: NormOptions) -> None:
        self._kernels = source.kernels
        self._options = options
        if options.has_weight:
            self._weight = source.tensor({f"{name}.weight": (size,)})
        else:
            self._weight = torch.ones(size, dtype=source.dtype, device=source.kernels.device)
        self.bytes = size * source.dtype.itemsize if options.has_weight else 0

    def __call__(self, x: Tensor | ResidualStream) -> Tensor:
        addend, stream = x.pop_addend() if isinstance(x, ResidualStream) else (None, x)
        if addend is None:
            return self._kernels.rms_norm(stream, self._weight, self._options.eps, self._options.offset)
        return self._kernels.add_rms_norm(addend, stream, self._weight, self._options.eps, self._options.offset)


class LayerNorm:
    """`(x - mean) / sqrt(variance + eps) * (offset + weight) + bias` over the last dimension, `[tokens, size]`."""

    def __init__(self, source: WeightSource, name: str, size: int, options: LayerNormOptions) -> None:
        self._kernels = source.kernels
        weight, bias = (source.tensor({f"{name}.{part}": (size,)}) if is_there else None
                        for part, is_there in (("weight", options.has_weight), ("bias", options.has_bias)))
        if weight is None and bias is None:
            weight = torch.ones(size, dtype=source.dtype, device=source.kernels.device) - options.offset
        self._weights = LayerNormWeights(weight, bias, options.eps, options.offset)
        self.bytes = (options.has_weight + options.has_bias) * size * source.dtype.itemsize

    def __call__(self, x: Tensor | ResidualStream) -> Tensor:
        if not isinstance(x, ResidualStream):
            return self._kernels.layer_norm(x, self._weights)
        addend, stream = x.pop_addend()
        if addend is None:
            return self._kernels.layer_norm(stream, self._weights)
        return self._kernels.layer_norm(addend, self._weights, stream)


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
    if not options.has_weight:
        query, key = (torch.ones(size, dtype=source.dtype, device=source.kernels.device) for size in sizes)
        return QKNorm(query, key, options.eps, options.offset)
    query, key = (source.tensor({f"{one}.weight": (size,)}, NO_CUTS if cut == WHOLE else {f"{one}.weight": cut})
                  for one, size, cut in zip(names, sizes, cuts, strict=True))
    return QKNorm(query, key, options.eps, options.offset)


@dataclass(frozen=True, slots=True)
class HeadNormOptions:
    """LayerNorms of each head of queries and keys.

    Args:
        names: of the norms of queries and of keys.
        stored: how: one weight for all heads, `[heads, head_dim]`, or a norm of its own for each head.
    """

    eps: float
    names: tuple[str, str] = ("q_layernorm", "k_layernorm")
    has_bias: bool = False
    stored: Literal["shared", "stacked", "separate"] = "shared"


class HeadNorms:
    """`[tokens, (heads + 2 * kv_heads) * head_dim] -> the same`, with queries and keys normed head by head.

    Args:
        heads: the heads of queries and of keys of this rank.
        totals: those of all ranks.
        order: of a head's dimensions, as in `Rope.order`.
    """

    def __init__(
        self, source: WeightSource, name: str, options: HeadNormOptions, heads: tuple[range, range],
        totals: tuple[int, int], head_dim: int, order: Tensor | None,
    ) -> None:
        self._kernels, self._eps, self._size, self._count = source.kernels, options.eps, head_dim, sum(map(len, heads))

        def read(kind: str) -> Tensor:
            """`[heads of queries, then of keys, head_dim]` float32."""
            parts = [_of_each_head(source, f"{name}.{each}", kind, options.stored, total, head_dim)
                     for each, total in zip(options.names, totals, strict=True)]
            stacked = torch.cat([part[own.start : own.stop] for part, own in zip(parts, heads, strict=True)]).float()
            return stacked if order is None else stacked[:, order]

        self._weight = read("weight")
        self._bias = read("bias") if options.has_bias else None
        norms = 2 if options.stored == "shared" else self._count
        self.bytes = (1 + options.has_bias) * norms * head_dim * source.dtype.itemsize  # as stored

    def __call__(self, qkv: Tensor) -> Tensor:
        return self._kernels.rowwise(self._normed, qkv)

    def _normed(self, qkv: Tensor) -> Tensor:
        normed, values = qkv.view(len(qkv), -1, self._size).tensor_split([self._count], dim=1)
        out = F.layer_norm(normed.float(), (self._size,), eps=self._eps) * self._weight
        if self._bias is not None:
            out += self._bias
        return torch.cat((out.to(qkv.dtype), values), dim=1).flatten(1)


def _of_each_head(source: WeightSource, name: str, kind: str, stored: str, heads: int, size: int) -> Tensor:
    """The weights or biases, `[heads, head_dim]`."""
    if stored == "separate":
        return source.tensor({f"{name}.norms.{head}.{kind}": (size,) for head in range(heads)}).view(heads, size)
    if stored == "stacked":
        return source.tensor({f"{name}.{kind}": (heads, size)})
    return source.tensor({f"{name}.{kind}": (size,)}).expand(heads, size)

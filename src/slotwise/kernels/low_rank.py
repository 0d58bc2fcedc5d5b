"""What adapters add to products: low-rank terms (LoRA, Hu et al., 2021), different ones for the rows of one step.

    out[i] += x[i] @ a[place[i]].T @ b[place[i]].T + bias[place[i]]          place[i]: of row i's adapter, or none

One product of a model may be several weights of its checkpoint, stacked along their outputs; an adapter has factors of
its own for each of them, or for some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

NO_ADAPTER = -1  # the place of a row that is computed with the base model


class LowRankPart(NamedTuple):
    """What an adapter adds to some outputs of a product: `x @ a.T @ b.T`; nothing where the rank is 0."""

    first: int  # of the outputs
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], scaled


class LowRank(NamedTuple):
    """What an adapter adds to a product: parts, whose outputs differ, and a bias, of outputs that belong to a part."""

    parts: tuple[LowRankPart, ...]
    bias: Tensor | None = None  # [outputs of the product], 0 where there is no part


Packed = Any
"""An adapter's factors of one product, as its kernels pack them."""


class AddedProduct(Protocol):
    """What adapters add to one product."""

    def pack(self, factors: LowRank) -> Packed:
        """Returns an adapter's factors for `set`; changes nothing, so that a step may run meanwhile."""
        ...

    def set(self, place: int, packed: Packed | None) -> None:
        """Put packed factors at a place, or forget those there.  No row of a step that runs may have this place."""
        ...

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to `out [rows, outputs]`, in place, what the adapter of each row of `x [rows, inputs]` adds to it.

        Sums are float32, rounded once.  A row's result does not depend on the rows beside it.  Returns `out`.
        """
        ...


class AdapterProducts(Protocol):
    """The adapters of rows, and what they add to the products of one model.  Graphs read the rows from memory."""

    @property
    def are_any(self) -> bool:
        """Whether a row has an adapter."""
        ...

    def assign(self, places: Sequence[int]) -> None:
        """Set the place of the adapter of each row of the products that follow, NO_ADAPTER for none."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep these rows, `[rows]` int64, of those that were assigned."""
        ...

    def product(self, outputs: int, inputs: int, num_parts: int) -> AddedProduct:
        """What adapters add to a product, in so many parts at most; nothing before any is set."""
        ...


class ReferenceAdapters:
    """The contract in plain torch."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.places: Sequence[int] = ()

    @property
    def are_any(self) -> bool:
        return any(place != NO_ADAPTER for place in self.places)

    def assign(self, places: Sequence[int]) -> None:
        self.places = places

    def select(self, rows: Tensor) -> None:
        self.places = [self.places[row] for row in rows.tolist()] if self.are_any else ()

    def product(self, outputs: int, inputs: int, num_parts: int) -> _ReferenceAdded:
        return _ReferenceAdded(self)


class _ReferenceAdded:
    """Adapter by adapter."""

    def __init__(self, adapters: ReferenceAdapters) -> None:
        self._adapters = adapters
        self._factors: list[LowRank | None] = [None] * adapters.num_places

    def pack(self, factors: LowRank) -> LowRank:
        return factors

    def set(self, place: int, packed: LowRank | None) -> None:
        self._factors[place] = packed

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        places = torch.tensor(self._adapters.places, device=x.device)
        for place in places.unique().tolist():
            factors = None if place == NO_ADAPTER else self._factors[place]
            if factors is None:
                continue
            rows = (places == place).nonzero()[:, 0]
            added = torch.zeros(len(rows), out.shape[1], device=x.device)
            if factors.bias is not None:
                added += factors.bias.float()
            for first, a, b in factors.parts:
                added[:, first : first + len(b)] += x[rows].float() @ a.float().T @ b.float().T
            out[rows] = (out[rows].float() + added).to(out.dtype)
        return out

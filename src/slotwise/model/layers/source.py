"""Where layers get their weights, and the kernels that pack them.

A layer asks for its tensors by their names and shapes while it is constructed.  So the same code that builds a model
also lists the tensors that it needs, before any file is opened: it is built over `Listing`, whose tensors have shapes
and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slotwise.kernels.interface import Kernels, Linear
from slotwise.kernels.matrix import Format, QuantisedMatrix, Rows, Weight, stacked
from slotwise.kernels.reference import ReferenceKernels
from slotwise.model.adapters import Adapters
from slotwise.model.stored import Read, Shapes


class Source:
    """The tensors of a checkpoint, read as `dtype` to where `kernels` compute."""

    adapters: Adapters | None  # of the products that are built; None: they have none

    def __init__(
        self, read: Read, kernels: Kernels, dtype: torch.dtype, adapters: Adapters | None = None,
    ) -> None:
        self.kernels = kernels
        self.adapters = adapters
        self.dtype = dtype
        self._read = read

    def weight(self, shapes: Shapes) -> Weight:
        """The matrix of the one name in `shapes`, or those of several stacked along their outputs, as it is stored."""
        return self._read(*shapes)

    def tensor(self, shapes: Shapes) -> Tensor:
        """Plain numbers of `dtype`, of one name or of several stacked along their first dimension."""
        found = self.weight(shapes)
        return found if isinstance(found, Tensor) else found.dequantised().to(self.kernels.device, self.dtype)


class _Sizes(ReferenceKernels):
    """Packs nothing, and says the bytes that other kernels' packed weights take."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.linear_bytes = kernels.linear_bytes  # type: ignore[method-assign]
        self.head_bytes = kernels.head_bytes  # type: ignore[method-assign]

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return lambda x: x

    def embedding(self, table: QuantisedMatrix, kind: torch.dtype, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        return lambda token_ids: token_ids


class Listing(Source):
    """Lists the tensors that layers ask for, and gives them tensors without memory.

    Args:
        kernels: whose packed sizes count.
        formats: of quantised matrices, by name.
    """

    def __init__(
        self, dtype: torch.dtype, kernels: Kernels | None = None, formats: Mapping[str, Format] | None = None,
    ) -> None:
        super().__init__(self._record, _Sizes(kernels) if kernels else ReferenceKernels(), dtype)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._formats = formats or {}

    def weight(self, shapes: Shapes) -> Weight:
        """A matrix that cannot be read, or an empty tensor on the device "meta"; notes names and shapes."""
        self.shapes |= shapes
        return super().weight(shapes)

    def tensor(self, shapes: Shapes) -> Tensor:
        self.shapes |= shapes
        return self._empty(*shapes)

    def _record(self, *names: str) -> Weight:
        if not all(name in self._formats for name in names):
            return self._empty(*names)
        sizes = {name: (self.shapes[name][0], self.shapes[name][1]) for name in names}
        return stacked([QuantisedMatrix(self._formats[name], *size, _unreadable) for name, size in sizes.items()])

    def _empty(self, *names: str) -> Tensor:
        rows = sum(self.shapes[name][0] for name in names)
        return torch.empty((rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device="meta")


def _unreadable(first: int, end: int) -> Rows:
    raise TypeError("a listed matrix has no contents")

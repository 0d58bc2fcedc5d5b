"""Where layers get their weights, and the kernels that pack them.

A layer asks for its tensors by their names and shapes while it is constructed.  So the same code that builds a model
also lists the tensors that it needs, before any file is opened: it is built over `Listing`, whose tensors have shapes
and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from slotwise.kernels.group import ALONE, Group
from slotwise.kernels.interface import Kernels, Linear
from slotwise.kernels.matrix import Format, QuantisedMatrix, Rows, Weight, stacked
from slotwise.kernels.reference import ReferenceKernels
from slotwise.model.adapters import Adapters
from slotwise.model.stored import WHOLE, Cuts, Read, Shapes, matrix_size

NO_CUTS: Cuts = {}


class Source:
    """The tensors of a checkpoint, read as `dtype` to where `kernels` compute, as the rank of `group` needs them."""

    adapters: Adapters | None  # of the products that are built; None: they have none

    def __init__(
        self, read: Read, kernels: Kernels, dtype: torch.dtype, adapters: Adapters | None = None, group: Group = ALONE,
        formats: Mapping[str, Format] = {},
    ) -> None:
        """Args: formats: of quantised matrices, by name."""
        self.kernels = kernels
        self.adapters = adapters
        self.group = group
        self.dtype = dtype
        self.unit = max((kind.unit for kind in formats.values()), default=1)  # inputs of a product that stay together
        self._read = read

    def weight(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Weight:
        """The matrix of the one name in `shapes`, or those of several stacked along their outputs, as it is stored."""
        return self._read(*shapes, cuts=cuts) if cuts else self._read(*shapes)

    def tensor(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Tensor:
        """Plain numbers of `dtype`, of one name or of several stacked along their first dimension."""
        found = self.weight(shapes, cuts)
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
        group: Group = ALONE, adapters: Adapters | None = None,
    ) -> None:
        self._formats = formats or {}
        super().__init__(self._record, _Sizes(kernels) if kernels else ReferenceKernels(), dtype, adapters, group,
                         self._formats)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def weight(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Weight:
        """A matrix that cannot be read, or an empty tensor on the device "meta"; notes names and shapes."""
        self.shapes |= shapes
        return super().weight(shapes, cuts)

    def tensor(self, shapes: Shapes, cuts: Cuts = NO_CUTS) -> Tensor:
        self.shapes |= shapes
        return self._empty(shapes, cuts)

    def _record(self, *names: str, cuts: Cuts = NO_CUTS) -> Weight:
        if not all(name in self._formats for name in names):
            return self._empty(names, cuts)
        whole = {name: QuantisedMatrix(self._formats[name], *matrix_size(self.shapes[name]), _unreadable)
                 for name in names}
        return stacked([cuts.get(name, WHOLE).of(matrix, name) for name, matrix in whole.items()])

    def _empty(self, names: Collection[str], cuts: Cuts) -> Tensor:
        sizes = [cuts.get(name, WHOLE).size(self.shapes[name]) for name in names]
        return torch.empty((sum(size[0] for size in sizes), *sizes[0][1:]), dtype=self.dtype, device="meta")


def _unreadable(first: int, end: int) -> Rows:
    raise TypeError("a listed matrix has no contents")

"""Where the tensors of a checkpoint come from: what each kind of file gives, and all that the rest of loading needs.

    safetensors_files   model.safetensors, or shards          gguf.tensors   a GGUF file, or its parts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slotwise.kernels.matrix import Format, QuantisedMatrix, Weight, narrowed, reordered
from slotwise.model.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class Cut(NamedTuple):
    """The part of a tensor that is wanted."""

    rows: tuple[range, ...] = ()  # along the first dimension, one behind the other; (): all
    columns: range | None = None  # along the second; None: all

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of `shape`."""
        rows = sum(map(len, self.rows)) if self.rows else shape[0]
        return (rows, *shape[1:]) if self.columns is None else (rows, len(self.columns), *shape[2:])

    def of(self, matrix: QuantisedMatrix, name: str) -> QuantisedMatrix:
        """This part of a quantised matrix.

        Raises:
            CheckpointError: it would divide a group of the matrix called `name`.
        """
        if self.rows:
            matrix = reordered(matrix, torch.cat([torch.arange(rows.start, rows.stop) for rows in self.rows]))
        try:
            return matrix if self.columns is None else narrowed(matrix, self.columns)
        except ValueError as error:
            raise CheckpointError(f"{name}: a rank would have {error}, which divides a group: choose another "
                                  "tensor_parallel_size, or pipeline_parallel_size") from error

    def rows_of(self, x: Tensor) -> Tensor:
        """These rows of a tensor in memory."""
        return torch.cat([x[rows.start : rows.stop] for rows in self.rows]) if self.rows else x

    def columns_of(self, x: Tensor) -> Tensor:
        """These columns of a tensor in memory."""
        return x if self.columns is None else x[:, self.columns.start : self.columns.stop]


def matrix_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Outputs and depth of the quantised matrix that a tensor of `shape` is.

    `[matrices, depth, outputs]` is one as well: all matrices, transposed, one behind the other along their outputs.

    Raises:
        ValueError: it is neither.
    """
    match shape:
        case (outputs, depth):
            return outputs, depth
        case (matrices, depth, outputs):
            return matrices * outputs, depth
    raise ValueError(f"a tensor of shape {list(shape)} is no matrix")


WHOLE = Cut()
Cuts = Mapping[str, Cut]
"""Parts of tensors, by name; what is not named is whole."""

Read = Callable[..., Weight]
"""`read(name, ..., cuts={})`: one tensor, or several stacked along their first dimension.

Plain numbers are in memory of their own; a quantised matrix is read from the file where it is unpacked.
"""


class StoredTensor(Protocol):
    """A tensor in a file that is mapped: nothing of it is in memory before it is read."""

    @property
    def kind(self) -> str:
        """How it is stored, by its name in the file's format."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """In the file."""
        ...

    def rows(self, first: int, end: int) -> Tensor:
        """Rows `first ... end - 1` along the first dimension, of the type that they are stored as.

        Not of a quantised tensor of two dimensions.
        """
        ...

    @property
    def format(self) -> Format | None:
        """Of a quantised matrix; None where plain numbers are stored."""
        ...

    def matrix(self) -> QuantisedMatrix:
        """The whole, where it has a format, as `matrix_size` says."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The tensors of a checkpoint by the names that families use."""

    where: str  # the folder or the file, for messages
    described_by: str  # what says which tensors there are, for messages
    tensors: Mapping[str, StoredTensor]
    is_exact: bool = False  # nothing is there but what a model reads
    is_headless: bool = False  # it may have been saved without its head, to make vectors

    def shown(self, name: str) -> str:
        """The name of a tensor in the file."""
        return name

"""The tensors of a checkpoint's files, as the rest of loading sees them, and those of safetensors files.

`gguf/gguf_tensors.py` is the source for GGUF files.  A safetensors checkpoint is `model.safetensors`, or the shards of
`model.safetensors.index.json`:

    length u64   of a JSON object: {"name": {"dtype", "shape", "data_offsets": [first, end]}, ...}   the data

The tables are read first; a file is mapped when one of its tensors is read.  Pickled weights are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Weight, narrowed, reordered
from slotwise.compute.model.checkpoint import CONFIG, INDEX, WEIGHTS
from slotwise.compute.model.fields import read_json
from slotwise.compute.model.names import canonical
from slotwise.errors import CheckpointError
from slotwise.platform.files import check_part

Shapes = Mapping[str, tuple[int, ...]]


class Cut(NamedTuple):
    """The part of a tensor that is wanted."""

    rows: tuple[range, ...] = ()  # along the first dimension, one behind the other; (): all
    columns: range | None = None  # along the second; None: all

    def size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor of `shape`; a number counts as a list of one."""
        shape = shape or (1,)
        rows = sum(map(len, self.rows)) if self.rows else shape[0]
        return (rows, *shape[1:]) if self.columns is None else (rows, len(self.columns), *shape[2:])

    def of(self, matrix: QuantizedMatrix, name: str) -> QuantizedMatrix:
        """This part of a quantized matrix.

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
    """Outputs and depth of the quantized matrix that a tensor of `shape` is.

    `[matrices, depth, outputs]` counts as a matrix, too: all of them transposed and concatenated along outputs.

    Raises:
        ValueError: it is neither.
    """
    match shape:
        case (outputs, depth):
            return outputs, depth
        case (matrices, depth, outputs):
            return matrices * outputs, depth
    raise ValueError(f"a tensor of shape {list(shape)} is not a matrix")


WHOLE = Cut()
Cuts = Mapping[str, Cut]
"""Parts of tensors, by name; other tensors are whole."""

Read = Callable[..., Weight]
"""`read(name, ..., cuts={}, kind=dtype)`: one tensor, or several stacked along their first dimension.

Plain numbers are of type `kind`, by default the model's, in memory of their own; a quantized matrix is read from the
file where it is unpacked.
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

        Not of a quantized tensor of two dimensions.
        """
        ...

    @property
    def format(self) -> Format | None:
        """Of a quantized matrix; None where plain numbers are stored."""
        ...

    def matrix(self) -> QuantizedMatrix:
        """The whole matrix, if it has a format; see `matrix_size`."""
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


EMBEDDING = "embed_tokens"  # the embedding, as a model saved without its head names it
MODULES = "modules.json"  # in the folder of a model that makes vectors
MAX_NAME_BYTES = 255
MAX_TABLE_BYTES = 100 << 20  # the format's own bound
LENGTH_BYTES = 8
ABOUT = "__metadata__"  # no tensor
_NAMED = 3  # files named in an error before "and n more"


class TableEntry(NamedTuple):
    """A tensor in a table."""

    kind: str
    shape: tuple[int, ...]
    nbytes: int
    at: int  # its first byte in the file


class SafetensorsFile:
    """A file; its table is read at once.  Raises CheckpointError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            check_part(path)
            with path.open("rb") as file:
                self.table = read_table(file, path.stat().st_size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise damaged(path, error) from error

    @cached_property
    def mapped(self) -> Any:
        """The file as the library opens it, which checks all of the table."""
        try:
            return safe_open(self._path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise damaged(self._path, error) from error


def damaged(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that is not in the format."""
    return CheckpointError(f"{path} is damaged or incomplete ({error!s:.200}): download it again")


class SafetensorsTensor:
    """One tensor of a file."""

    format = None

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self._file, self._name = file, name
        self.kind, self.shape, self.nbytes, _ = file.table[name]

    def rows(self, first: int, end: int) -> Tensor:
        if not self.shape:
            return self._file.mapped.get_tensor(self._name)  # type: ignore[no-any-return]
        return self._file.mapped.get_slice(self._name)[first:end]  # type: ignore[no-any-return]

    def matrix(self) -> QuantizedMatrix:
        raise TypeError(f"{self._name} is not a quantized matrix")


class TransposedTensor:
    """A matrix that is stored as `[inputs, outputs]`."""

    format = None

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self.kind, self.shape, self.nbytes = stored.kind, stored.shape[::-1], stored.nbytes

    def rows(self, first: int, end: int) -> Tensor:
        return self._stored.rows(0, self.shape[1])[:, first:end].T

    def matrix(self) -> QuantizedMatrix:
        return self._stored.matrix()


def open_safetensors(folder: Path, modules: Sequence[str] = ()) -> TensorSource:
    """Reads the tables of a folder's files, and of those in `modules`, folders in it, whose names their tensors get.

    Raises:
        CheckpointError: there are none, one is damaged, or the index does not match the files.
    """
    tensors: dict[str, StoredTensor] = {}
    is_headless = False
    for path in _weight_files(folder):
        file = SafetensorsFile(path)
        for name in file.table:
            if (known := canonical(name)) in tensors:
                raise CheckpointError(f"{path}: tensor {name:.120} is there twice, under names that mean the same")
            tensors[known] = SafetensorsTensor(file, name)
            is_headless |= known != name and name == f"{EMBEDDING}.weight"
    for module in modules:
        for path in _weight_files(folder / module):
            file = SafetensorsFile(path)
            tensors |= {f"{module}.{name}": SafetensorsTensor(file, name) for name in file.table}
    return TensorSource(str(folder), CONFIG, tensors, is_headless=is_headless or (folder / MODULES).is_file())


def read_table(file: BinaryIO, size: int, most: int = MAX_TABLE_BYTES) -> dict[str, TableEntry]:
    """The table of a file of `size` bytes, of at most `most` itself.

    Raises ValueError, TypeError, KeyError or RecursionError when it is malformed.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(most, size - LENGTH_BYTES):
        raise ValueError(f"a table of {length} bytes in a file of {size}")
    entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its table is not an object")
    table, last = {}, 0
    for name, entry in entries.items():
        if name == ABOUT:
            continue
        (first, end), shape = entry["data_offsets"], tuple(map(_size, entry["shape"]))
        if not 0 <= _size(first) <= _size(end):
            raise ValueError(f"{name!r:.60} has offsets {first!r:.20} and {end!r:.20}")
        table[name] = TableEntry(str(entry["dtype"]), shape, end - first, LENGTH_BYTES + length + first)
        last = max(last, end)
    if LENGTH_BYTES + length + last != size:
        raise ValueError(f"its tensors end at byte {LENGTH_BYTES + length + last}, the file at {size}")
    return table


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a size or an offset is {value!r:.20}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    single = folder / WEIGHTS
    return [single] if single.is_file() else _shards(folder / INDEX)


def _shards(index: Path) -> list[Path]:
    named = read_json(index).section("weight_map").values.values()
    valid = [name for name in named if _is_file_name(name)]
    if not valid or len(valid) < len(named):
        raise CheckpointError(f"{index}: weight_map must map each tensor to a file in its folder")
    names = sorted(set(valid))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {_listed(missing)}; download them again"
        )
    return [index.parent / name for name in names]


def _is_file_name(name: object) -> bool:
    """Whether it names a file in the same folder, in characters that every file system supports."""
    return (isinstance(name, str) and name.isprintable() and Path(name).name == name
            and len(name.encode()) <= MAX_NAME_BYTES)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

"""Tensors in safetensors files: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    length u64   of a JSON object: {"name": {"dtype", "shape", "data_offsets": [first, end]}, ...}   the data

The tables are read first; a file is mapped when a tensor of it is read.  Pickled weights are never opened.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slotwise.files import check_part
from slotwise.kernels.matrix import QuantisedMatrix
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import read_json
from slotwise.model.formats import CONFIG, INDEX, WEIGHTS
from slotwise.model.names import canonical
from slotwise.model.stored import StoredTensor, TensorSource

TABLE = "embed_tokens"  # the embedding, as a model saved without its head names it
MODULES = "modules.json"  # beside a model that makes vectors
MAX_NAME_BYTES = 255
MAX_TABLE_BYTES = 100 << 20  # the format's own bound
LENGTH_BYTES = 8
ABOUT = "__metadata__"  # no tensor
_NAMED = 3  # files named in an error before "and n more"


class Entry(NamedTuple):
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
    """The error of a file that is none of the format."""
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

    def matrix(self) -> QuantisedMatrix:
        raise TypeError(f"{self._name} is no quantised matrix")


def open_safetensors(folder: Path) -> TensorSource:
    """Reads the tables of a folder's files.

    Raises:
        CheckpointError: there are none, one is damaged, or the index does not match the files.
    """
    tensors: dict[str, StoredTensor] = {}
    is_headless = False
    for path in _files(folder):
        file = SafetensorsFile(path)
        for name in file.table:
            if (known := canonical(name)) in tensors:
                raise CheckpointError(f"{path}: tensor {name:.120} is there twice, under names that mean the same")
            tensors[known] = SafetensorsTensor(file, name)
            is_headless |= known != name and name == f"{TABLE}.weight"
    return TensorSource(str(folder), CONFIG, tensors, is_headless=is_headless or (folder / MODULES).is_file())


def read_table(file: BinaryIO, size: int, most: int = MAX_TABLE_BYTES) -> dict[str, Entry]:
    """The table of a file of `size` bytes, of at most `most` itself.

    Raises ValueError, TypeError, KeyError or RecursionError when it is malformed.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(most, size - LENGTH_BYTES):
        raise ValueError(f"a table of {length} bytes in a file of {size}")
    entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError("its table is no object")
    table, last = {}, 0
    for name, entry in entries.items():
        if name == ABOUT:
            continue
        (first, end), shape = entry["data_offsets"], tuple(map(_size, entry["shape"]))
        if not 0 <= _size(first) <= _size(end):
            raise ValueError(f"{name!r:.60} has offsets {first!r:.20} and {end!r:.20}")
        table[name] = Entry(str(entry["dtype"]), shape, end - first, LENGTH_BYTES + length + first)
        last = max(last, end)
    if LENGTH_BYTES + length + last != size:
        raise ValueError(f"its tensors end at byte {LENGTH_BYTES + length + last}, the file at {size}")
    return table


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a size or an offset is {value!r:.20}")
    return value


def _files(folder: Path) -> list[Path]:
    single = folder / WEIGHTS
    return [single] if single.is_file() else _shards(folder / INDEX)


def _shards(index: Path) -> list[Path]:
    named = read_json(index).section("weight_map").values.values()
    beside = [name for name in named if _is_file_name(name)]
    if not beside or len(beside) < len(named):
        raise CheckpointError(f"{index}: weight_map must map each tensor to a file beside it")
    names = sorted(set(beside))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {_list(missing)}; download them again"
        )
    return [index.parent / name for name in names]


def _is_file_name(name: object) -> bool:
    """Whether it names a file in the same folder, in characters that every file system supports."""
    return (isinstance(name, str) and name.isprintable() and Path(name).name == name
            and len(name.encode()) <= MAX_NAME_BYTES)


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

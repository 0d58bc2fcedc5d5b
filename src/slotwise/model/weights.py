"""Tensors of a checkpoint by name, from memory-mapped safetensors files.  Pickled weights are never opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slotwise.files import check_part
from slotwise.model.errors import CheckpointError
from slotwise.model.fields import read_json
from slotwise.model.formats import INDEX, WEIGHTS

Shapes = Mapping[str, tuple[int, ...]]
Progress = Callable[[int, int], None]
"""Receives bytes read so far and bytes in all."""

Read = Callable[..., Tensor]
"""`read(name, ...)`: one tensor, or several stacked along their first dimension, in memory of its own."""

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
RENAMED = (("language_model.model.", "model."), ("model.language_model.", "model."),
           ("language_model.lm_head.", "lm_head."))  # beginnings of names
MAX_NAME_BYTES = 255
MATRIX = 2  # dimensions
COMPARED_NUMBERS = 1 << 22  # of two matrices, at a time
_NAMED = 3  # tensors named in an error before "and n more"


class Weights:
    """An open checkpoint: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    Raises:
        CheckpointError: there is no safetensors file, one is damaged, or the index does not match the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source: dict[str, _Stored] = {}
        for path in _files(folder):
            file = _open(path)
            names = file.keys()
            self._source.update({_canonical(name): _Stored(file, name) for name in names})

    def holds(self, name: str) -> bool:
        return name in self._source

    def are_stored_as(self, kind: str) -> bool:
        """Whether any tensor is stored as `kind`, by its name in the file."""
        return any(self._stored(name) == kind for name in self._source)

    def are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two stored matrices are the same once they are `dtype`, compared a few rows at a time."""
        first, second = (self._source[name].part() for name in (one, other))
        shape = first.get_shape()
        is_usable = {self._stored(one), self._stored(other)} <= set(_BYTES)
        if not is_usable or len(shape) != MATRIX or second.get_shape() != shape:
            return False
        rows = max(1, COMPARED_NUMBERS // max(1, shape[1]))
        return all(torch.equal(first[at : at + rows].to(dtype), second[at : at + rows].to(dtype))
                   for at in range(0, shape[0], rows))

    def reader(self, expected: Shapes, dtype: torch.dtype, progress: Progress | None = None) -> Read:
        """Check that exactly the expected tensors exist; returns a function that reads them as `dtype`.

        Raises CheckpointError when tensors are missing, have another shape or are quantised, or when a served layer has
        tensors that are not expected: its output would be silently wrong.  The returned function raises it for a tensor
        that holds NaN, infinity or a number too large for `dtype`.
        """
        self._check_names(expected)
        self._check_shapes(expected)
        size = {name: prod(shape) * _BYTES[self._stored(name)] for name, shape in expected.items()}
        total, done = sum(size.values()), 0

        def read(*names: str) -> Tensor:
            nonlocal done
            # `cat` copies even a single tensor: nothing refers to the file once it has been read.
            tensor = torch.cat([self._source[name].tensor().to(dtype) for name in names])
            if not _is_finite(tensor):
                raise self._not_finite(names, dtype)
            done += sum(size[name] for name in names)
            if progress is not None:
                progress(done, total)
            return tensor

        return read

    def _check_names(self, expected: Shapes) -> None:
        missing = [name for name in expected if name not in self._source]
        if missing:
            raise CheckpointError(
                f"{self._folder} lacks {len(missing)} of {len(expected)} weights: {_list(missing)}; "
                "download the checkpoint again, or check that config.json belongs to it"
            )
        layers = {name.split(".")[2] for name in expected if name.startswith("model.layers.")}
        unread = sorted(
            name for name in self._source
            if name not in expected and name.startswith("model.layers.") and name.split(".")[2] in layers
            and not name.endswith("rotary_emb.inv_freq")  # in old checkpoints; it follows from the config
        )
        if unread:
            raise CheckpointError(
                f"{self._folder} holds {len(unread)} weights that its config.json leaves no room for: {_list(unread)}; "
                "check that config.json belongs to it"
            )

    def _check_shapes(self, expected: Shapes) -> None:
        for name, shape in expected.items():
            stored = tuple(self._source[name].part().get_shape())
            if stored != shape:
                raise CheckpointError(
                    f"{self._folder}: {name} has shape {list(stored)}, but config.json asks for {list(shape)}"
                )
            if self._stored(name) not in _BYTES:
                raise CheckpointError(
                    f"{self._folder}: {name} is stored as {self._stored(name)}: quantised checkpoints are not supported"
                )

    def _not_finite(self, names: tuple[str, ...], dtype: torch.dtype) -> CheckpointError:
        """The error for the first of these tensors that is not finite as `dtype`."""
        tensors = {name: self._source[name].tensor() for name in names}
        name = next(name for name, tensor in tensors.items() if not _is_finite(tensor.to(dtype)))
        if _is_finite(tensors[name]):
            kind = str(dtype).removeprefix("torch.")
            return CheckpointError(f"{self._folder}: {name} holds numbers too large for {kind}: try --dtype float32")
        return CheckpointError(f"{self._folder}: {name} holds NaN or infinite numbers: download the checkpoint again")

    def _stored(self, name: str) -> str:
        return str(self._source[name].part().get_dtype())


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Any
    name: str

    def tensor(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def part(self) -> Any:
        """What is known of it before it is read, and rows of it."""
        return self.file.get_slice(self.name)


def _canonical(name: str) -> str:
    """The name in a checkpoint of a language model, of a tensor of one that is part of a model for images and text."""
    return next((new + name.removeprefix(old) for old, new in RENAMED if name.startswith(old)), name)


def files_may_hold(folder: Path, expected: Shapes) -> bool:
    """Whether the files of weights are large enough for tensors of these shapes.

    Raises:
        CheckpointError: there are none, or the index is not valid.
    """
    least = min(_BYTES.values()) * sum(map(prod, expected.values()))
    return sum(path.stat().st_size for path in _files(folder)) >= least


def _is_finite(tensor: Tensor) -> bool:
    """At the speed of memory: the least and the greatest are NaN where any number is."""
    return all(bound.isfinite().item() for bound in tensor.aminmax())


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


def _open(path: Path) -> Any:
    try:
        check_part(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error}): download it again") from error


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

"""Opens a GGUF file, or one part of a split one: its metadata, and where its tensors lie.

    "GGUF" version u32   tensors u64   values u64
    values               key, type u32, value
    tensors              name, dimensions u32, sizes u64 (the fastest first), type u32, offset u64 in the data
    (padding)            to `general.alignment`
    data                 each tensor at a multiple of the alignment, in rows of whole blocks
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from slotwise.errors import CheckpointError
from slotwise.gguf.cursor import Cursor
from slotwise.gguf.metadata import Metadata
from slotwise.gguf.types import TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_VALUES = 1 << 14
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 31  # of a dimension
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20  # bytes: the widest number has eight


class StoredTensor(NamedTuple):
    """A tensor of a file.  `shape` is in torch's order, the slowest first; `start` and `end` are bytes of the file."""

    shape: tuple[int, ...]
    type: BlockType
    start: int
    end: int


class GGUFFile(NamedTuple):
    path: Path
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]
    data: mmap.mmap  # the whole file, read only


def open_gguf(path: Path) -> GGUFFile:
    """Reads all but the data, and maps it.

    Raises:
        CheckpointError: the file cannot be read, or is not a whole and valid one; the message names the field.
    """
    data = _mapped(path)
    cursor = Cursor(data, str(path))
    version, num_tensors, num_values = _header(cursor)
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise cursor.error("it is written for big-endian machines, which is not supported" if big else
                           f"version {version} of the format is not supported: these are {VERSIONS[0]} and 3")
    values: dict[str, Any] = {}
    for number in range(num_values):
        key = cursor.name(f"the key of value {number}")
        if key in values:
            raise cursor.error(f"{key} is there twice")
        values[key] = cursor.value(key)
    metadata = Metadata(values, data, str(path))
    alignment = metadata.integer(ALIGNMENT, 32, minimum=MIN_ALIGNMENT, maximum=MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise metadata.error(ALIGNMENT, f"must be a power of two, not {alignment}")
    return GGUFFile(path, metadata, _tensors(cursor, num_tensors, alignment), data)


def _header(cursor: Cursor) -> tuple[int, int, int]:
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise cursor.error(f"it does not begin with {MAGIC.decode()}: it is not a GGUF file, or a damaged one")
    cursor.at = len(MAGIC)
    version = cursor.integer("I", "the version")
    if version not in VERSIONS:
        return version, 0, 0  # what follows may have other sizes
    num_tensors = cursor.integer("Q", "the number of tensors")
    num_values = cursor.integer("Q", "the number of values")
    for what, number, most in (("tensors", num_tensors, MAX_TENSORS), ("values", num_values, MAX_VALUES)):
        if number > most:
            raise cursor.error(f"the number of {what} is {number}, more than {most}")
    return version, num_tensors, num_values


def _tensors(cursor: Cursor, number: int, alignment: int) -> dict[str, StoredTensor]:
    """The tensors by name, each checked to lie in the file, right behind the one before it.

    So a tensor with a wrong type, size or offset is noticed, unless as many bytes are right for it.
    """
    found: dict[str, tuple[tuple[int, ...], BlockType, int]] = {}
    for index in range(number):
        name = cursor.name(f"the name of tensor {index}")
        if name in found:
            raise cursor.error(f"tensor {name} is there twice")
        found[name] = _description(cursor, name, alignment)
    base = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in found.items():
        start = base + offset
        end = start + prod(shape) // kind.numbers * kind.bytes
        if end > len(cursor.data):
            raise cursor.error(f"tensor {name} goes beyond the end of the file: it is incomplete, or its offset wrong")
        tensors[name] = StoredTensor(shape, kind, start, end)
    expected = base
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start != expected:
            what = "shares bytes with the one before it" if tensor.start < expected else "does not follow it"
            raise cursor.error(f"tensor {name} begins at byte {tensor.start} and {what}: a type, a size or an offset "
                               "is wrong")
        expected = -(-tensor.end // alignment) * alignment
    if len(cursor.data) > expected and tensors:
        raise cursor.error(f"the last tensor ends at byte {expected} of {len(cursor.data)}: a type or a size is wrong")
    return tensors


def _description(cursor: Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], BlockType, int]:
    """Shape, type, and offset in the data."""
    dimensions = cursor.integer("I", f"the dimensions of tensor {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name} has {dimensions} dimensions, and may have 1 to {MAX_DIMENSIONS}")
    sizes = [cursor.integer("Q", f"the sizes of tensor {name}") for _ in range(dimensions)]
    kind, offset = cursor.integer("I", f"the type of tensor {name}"), cursor.integer("Q", f"the offset of {name}")
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise cursor.error(f"tensor {name} has sizes {sizes}, and each may be from 1 to {MAX_SIZE}")
    if kind not in TYPES:
        raise cursor.error(f"tensor {name} has the unknown type {kind}")
    if sizes[0] % TYPES[kind].numbers:
        raise cursor.error(f"tensor {name} has rows of {sizes[0]} numbers, no multiple of the {TYPES[kind].numbers} "
                           f"in a block of {TYPES[kind].name}")
    if offset % alignment:
        raise cursor.error(f"tensor {name} has the offset {offset}, no multiple of the alignment {alignment}")
    return tuple(reversed(sizes)), TYPES[kind], offset


def _mapped(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # mmap's word for it
        raise CheckpointError(f"{path} is empty: download it again") from error

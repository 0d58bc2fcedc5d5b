"""A model in GGUF: one file, or the parts of a split one, `NAME-00001-of-00003.gguf` and so on.

The first part holds the metadata, and any part tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slotwise.errors import CheckpointError
from slotwise.files import check_part
from slotwise.gguf.metadata import Metadata
from slotwise.gguf.reader import MAGIC, GGUFFile, StoredTensor, open_gguf

SUFFIX = ".gguf"
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
MAX_PARTS = 1024
TYPE, MODEL = "general.type", "model"
BESIDE = "mmproj"  # how the names of files begin that belong to a model: what reads its pictures


class GGUFModel(NamedTuple):
    """All parts of a model, open."""

    path: Path  # of the first
    metadata: Metadata
    tensors: Mapping[str, tuple[Path, StoredTensor]]  # by name, with the file that holds it


def open_model(path: Path) -> GGUFModel:
    """Opens `path`, and the other parts if it is the first of several.

    Raises:
        CheckpointError: a file is missing or not valid, is no part of the same model, or holds no language model.
    """
    first = open_gguf(path)
    metadata = first.metadata
    if (kind := metadata.text(TYPE, MODEL)) != MODEL:
        raise metadata.error(TYPE, f"is {kind!r:.40}: the file holds no language model, but what belongs to one")
    count = metadata.integer(COUNT, 1, minimum=1, maximum=MAX_PARTS)
    paths = parts_of(path)
    if len(paths) != count or metadata.integer(NUMBER, 0):
        raise metadata.error(COUNT, f"is {count} and {NUMBER} {metadata.integer(NUMBER, 0)}, but by its name the file "
                             f"is part 1 of {len(paths)}: name it as it was")
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for number, part_path in enumerate(paths):
        part = first if not number else _part(part_path, number, count)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part_path}: tensor {name} is in {tensors[name][0].name}, too")
            tensors[name] = part_path, tensor
    if count > 1 and metadata.integer(TENSORS, len(tensors)) != len(tensors):
        raise metadata.error(TENSORS, f"is {metadata.integer(TENSORS)}, but the parts hold {len(tensors)}")
    return GGUFModel(path, metadata, tensors)


def _part(path: Path, number: int, count: int) -> GGUFFile:
    try:
        check_part(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    part = open_gguf(path)
    for key, expected in ((NUMBER, number), (COUNT, count)):
        if part.metadata.integer(key) != expected:
            raise part.metadata.error(key, f"is {part.metadata.integer(key)}, and must be {expected} by the file's "
                                      "name: it is a part of another model")
    return part


def parts_of(path: Path) -> list[Path]:
    """The paths of all parts of a model, by the name of one; itself alone if it is no part."""
    found = PART.fullmatch(path.name)
    count = int(found["count"]) if found else 1
    if not found or not 1 <= count <= MAX_PARTS:
        return [path]
    return [path.with_name(f"{found['name']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]


def models_among(names: Iterable[str]) -> list[str]:
    """Of file names those of models in GGUF: whole ones, and the first parts of split ones."""
    return [name for name in names if name.endswith(SUFFIX) and not name.startswith(BESIDE)
            and parts_of(Path(name))[0].name == name]


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF: its name may tell nothing, as in Ollama's store."""
    with suppress(OSError):
        if path.is_file():  # no pipe, which would be waited for
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
    return False

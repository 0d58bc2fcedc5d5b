"""Finds a model by what a user calls it, and knows by which names clients may ask for it.

    ""                         the built-in model
    builtin, smollm2           a name: the built-in model, or one with published weights, downloaded where it is missing
    a folder, a GGUF file      a checkpoint on this machine; ./smollm2 is a folder of that name
    owner/name[:Q4_K_M]        a checkpoint on the Hugging Face hub

The name of a model is never a path: it is the short one of a published model, the hub id, the name that a GGUF file
gives itself, or the name of the file or folder.  Clients may also ask by what was typed and by the path.  Does not
import torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from slotwise import builtin
from slotwise.compute.model.checkpoint import is_hub_id, locate
from slotwise.compute.model.published_models import PUBLISHED, Progress, pull
from slotwise.errors import CheckpointError, nearest
from slotwise.platform.files import HUB_REPOSITORY
from slotwise.platform.gguf_file import PART, SUFFIX, open_gguf

BUILTIN = "builtin"  # the name of the built-in model on the command line
NAMES = (BUILTIN, *PUBLISHED)
MAX_NAME = 96  # characters of a name that a file gives itself
GENERIC = ("model", "ggml-model")  # names of files that say nothing
_QUANTIZATION = re.compile(r"[.-](?:UD-)?(?:I?Q\d\w*|F16|F32|BF16|MXFP4\w*|TQ\d\w*)$", re.IGNORECASE)


class FoundModel(NamedTuple):
    """A model on this machine."""

    path: Path  # of its folder or its GGUF file
    name: str  # by which clients ask for it, unless a server is given another
    aliases: tuple[str, ...] = ()  # by which they may, too: what was typed, and paths


def find(model: str | Path = "", progress: Progress = lambda stage, done, total: None) -> FoundModel:
    """Returns the model called so; downloads it where it is missing.

    Args:
        progress: of the download of a published model; a download from the hub shows its own.

    Raises:
        CheckpointError: there is no such model, or it could not be downloaded.
    """
    typed = str(model)
    if typed in ("", BUILTIN, str(builtin.path())):
        return _found(builtin.path(), builtin.NAME, typed)
    if (published := PUBLISHED.get(typed)) is not None:
        path = pull(published, progress)
        return _found(path, published.served_name, typed, path.stem)
    try:
        path = locate(model)
    except CheckpointError as error:
        if os.sep in typed or Path(typed).suffix:
            raise
        near = nearest(typed, NAMES)
        raise CheckpointError(f"{error}; " + (
            f"did you mean {near}?" if near else f"or one of the names {', '.join(NAMES)}")) from error
    if is_hub_id(typed):
        return _found(path, typed, path.stem if path.is_file() else path.name)
    if path.is_file():
        return _found(path, _name_of_file(path), typed, path.stem)
    return _found(path, _name_of_folder(path), typed)


def _found(path: Path, name: str, *aliases: str) -> FoundModel:
    others = dict.fromkeys([*aliases, str(path), str(path.absolute()), os.path.abspath(path)])
    return FoundModel(path, name, tuple([alias for alias in others if alias and alias != name]))


def _name_of_file(path: Path) -> str:
    """The name that a GGUF file gives itself, else that of the file, without the names of its format and its part.

    Names with spaces are titles ("Smollm2 135M 8k Lc100K"): they stand where a file's own name says nothing.
    """
    metadata = open_gguf(path).metadata
    title = metadata.text("general.name", "") if metadata.has("general.name") else ""
    title = title if title.isprintable() and len(title) <= MAX_NAME and not set(title) & {"/", "\\"} else ""
    if title and " " not in title:
        return title
    if path.name.endswith(SUFFIX):
        part = PART.fullmatch(path.name)
        stem = _QUANTIZATION.sub("", part["name"] if part else path.name.removesuffix(SUFFIX))
        if stem not in GENERIC or not title:
            return stem
    return title.replace(" ", "-") or path.name


def _name_of_folder(path: Path) -> str:
    """The name of a folder, or the hub id of one in the hub's cache."""
    real = path.absolute()
    repository = real.parent.parent.name
    if real.parent.name == "snapshots" and repository.startswith(HUB_REPOSITORY):
        return repository.removeprefix(HUB_REPOSITORY).replace("--", "/", 1)
    return real.name or real.resolve().name or "model"

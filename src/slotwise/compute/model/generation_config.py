"""Finds a generation_config.json: the checkpoint's, or one that the operator names.  Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slotwise.compute.model.fields import Fields, read_json
from slotwise.compute.model.published_models import recommended_sampling
from slotwise.errors import CheckpointError
from slotwise.platform.files import has_part
from slotwise.platform.gguf_file import open_model

FILE = "generation_config.json"
PREFIX = "general.sampling."
SAMPLING = {  # keys of a GGUF file's metadata, by the fields that they stand for
    "temperature": f"{PREFIX}temp", "top_k": f"{PREFIX}top_k", "top_p": f"{PREFIX}top_p", "min_p": f"{PREFIX}min_p",
    "repetition_penalty": f"{PREFIX}penalty_repeat"}
LAST_N = f"{PREFIX}penalty_last_n"
NOT_OBEYED: dict[str, tuple[Any, ...]] = {  # with the values that have no effect
    f"{PREFIX}xtc_probability": (None, 0), f"{PREFIX}mirostat": (None, 0), LAST_N: (None, -1),
    f"{PREFIX}sequence": (None, "")}
OF_OTHERS = tuple(f"{PREFIX}{name}" for name in (  # have no effect without those
    "xtc_threshold", "mirostat_tau", "mirostat_eta"))
AUTO, NEUTRAL = "auto", "vllm"  # values of the setting that name no file


def absolute(setting: str) -> str:
    """The setting `generation_config` for a process whose folder may be another."""
    return setting if setting in (AUTO, NEUTRAL) else str(Path(setting).expanduser().absolute())


def named_file(setting: str) -> Path | None:
    """The file that the setting `generation_config` names, by itself or by its folder; None: the checkpoint's.

    Raises CheckpointError when there is no such file.
    """
    if setting in (AUTO, NEUTRAL):
        return None
    given = Path(os.path.realpath(absolute(setting)))
    path = given / FILE if given.is_dir() else given
    if not path.is_file():
        raise CheckpointError(
            f"generation_config must be {AUTO}, {NEUTRAL}, or a file, or a folder with {FILE}: {path} does not exist")
    return path


def read_generation(checkpoint: Path, named: Path | None = None) -> Fields:
    """The fields of `named` or of the checkpoint's file; empty if the checkpoint has no such file.

    A GGUF file has some of them in its metadata; the card of a published model recommends others.

    Raises CheckpointError when it cannot be read or is not a JSON object.
    """
    if named is None and checkpoint.is_file():
        metadata = open_model(checkpoint).metadata
        fields = SAMPLING | {key: key for key in NOT_OBEYED}
        given = {name: metadata.scalar(key) for name, key in fields.items() if metadata.has(key)}
        if given.get("repetition_penalty", 1) == 1:
            given.pop(LAST_N, None)  # the tokens that are penalized
        recommended = recommended_sampling(checkpoint)
        where = f"{checkpoint}: {PREFIX}*, as {FILE}"
        return Fields(recommended | given, f"{where}, and the model's card" if recommended else where)
    path = named or checkpoint / FILE
    return read_json(path) if named is not None or has_part(path) else Fields({}, str(path))

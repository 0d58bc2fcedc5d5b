"""Default pooling of a model, from its sentence-transformers files and the operator's changes to them.

    modules.json, 1_Pooling/config.json of the checkpoint  ─►  pooler_config  ─►  a request's own fields
    `pooling_type` of a GGUF file

A checkpoint without these files pools by its last token, and normalises.  Names of `pooler_config` are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slotwise.core.params import LAST, MEAN, PoolingParams
from slotwise.core.pooling_defaults import PoolingDefaults
from slotwise.engine.config import ConfigError
from slotwise.errors import CheckpointError
from slotwise.files import has_part, read_part
from slotwise.gguf_file import open_model
from slotwise.model.fields import MAX_JSON_BYTES, Fields, read_json
from slotwise.neutral import nearest

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
OBEYED = ("Transformer", "Pooling", "Normalize")  # modules of sentence-transformers, by the last part of their type
FLAGS = {  # of a pooling module, with the pooling they stand for
    "pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean"}
MODES = {"lasttoken": LAST, "mean": MEAN, "last": LAST}  # values of the newer field `pooling_mode`
OF_GGUF = (LAST, MEAN, "cls", LAST, "rank")  # by the number in a file; 0: none
TYPES = ("pooling_type", "seq_pooling_type")  # names of one field, as vLLM's versions have it
NORMALIZE = ("normalize", "use_activation")


def read_pooling(folder: str | Path, override: Mapping[str, Any] | None = None) -> PoolingDefaults:
    """The defaults of the checkpoint in `folder`, changed by `override`.

    Raises:
        CheckpointError: a file is malformed.
        ConfigError: a field of `override` is unknown or malformed.
    """
    found, changes = _of_checkpoint(Path(folder)), _changes(override)
    if "pooling_type" not in changes:
        return found if found.objection or not changes else PoolingDefaults(
            PoolingParams(found.params.pooling_type, normalize=changes["normalize"]))
    normalize = changes.get("normalize", found.params.normalize)
    return PoolingDefaults(PoolingParams(changes["pooling_type"], normalize=normalize))


def _changes(override: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(override, Mapping | None):
        raise ConfigError(f"pooler_config must be an object of fields, not {override!r:.40}")
    changes: dict[str, Any] = {}
    for name, value in (override or {}).items():
        if name in TYPES:
            kind = str(value).lower()
            if kind not in (LAST, MEAN):
                raise ConfigError(f"pooler_config: {name} must be LAST or MEAN, not {value!r:.40}")
            changes["pooling_type"] = kind
        elif name in NORMALIZE:
            if not isinstance(value, bool):
                raise ConfigError(f"pooler_config: {name} must be true or false, not {value!r:.40}")
            changes["normalize"] = value
        else:
            near = nearest(str(name), (*TYPES, *NORMALIZE))
            raise ConfigError(f"pooler_config: {name!s:.40} is not supported" + f"; did you mean {near}?" * bool(near))
    return changes


def _of_gguf(path: Path) -> PoolingDefaults:
    """What a GGUF file says; the last token, as in checkpoints, where it says nothing, or that it pools none."""
    metadata = open_model(path).metadata
    key = f"{metadata.text('general.architecture')}.pooling_type"
    kind = metadata.integer(key, 0, maximum=len(OF_GGUF) - 1)
    if OF_GGUF[kind] not in (LAST, MEAN):
        return PoolingDefaults(objection=f"{key} is {kind} ({OF_GGUF[kind]}), and only last-token and mean pooling are "
                               "there")
    return PoolingDefaults(PoolingParams(OF_GGUF[kind]))


def _of_checkpoint(folder: Path) -> PoolingDefaults:
    """What the files say; an objection where they say what is not implemented."""
    if folder.is_file():
        return _of_gguf(folder)
    modules, pooling, normalizes = folder / MODULES, folder / POOLING, True
    if has_part(modules):
        kinds = _modules(modules)
        if others := [kind for kind in kinds if kind not in OBEYED]:
            return PoolingDefaults(objection=f"{modules.name} has the module {others[0]:.40}, which is not supported")
        normalizes = "Normalize" in kinds
    if not has_part(pooling):
        return PoolingDefaults(PoolingParams(normalize=normalizes))
    kind = _pooling(read_json(pooling))
    if kind not in (LAST, MEAN):
        return PoolingDefaults(objection=f"{POOLING} says {kind:.60}, and only last-token and mean pooling are there")
    return PoolingDefaults(PoolingParams(kind, normalize=normalizes))


def _pooling(fields: Fields) -> str:
    """The pooling that a module's config names; of several all, as text.  They would be concatenated."""
    if fields.has("pooling_mode"):
        mode = fields.text("pooling_mode")
        return MODES.get(mode, mode)
    kinds = [kind for name, kind in FLAGS.items() if fields.flag(name)]
    return " and ".join(kinds) if kinds else MEAN


def _modules(path: Path) -> list[str]:
    """The kinds of a checkpoint's modules: the last part of each one's type."""
    try:
        found = json.loads(read_part(path, MAX_JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download the checkpoint again") from error
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise CheckpointError(f"{path} must hold a list of objects")
    return [str(module.get("type", "")).rpartition(".")[2] for module in found]

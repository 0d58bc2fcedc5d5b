"""Finds a checkpoint: a folder, a GGUF file, or either on the Hugging Face hub.  Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from slotwise.gguf.model import is_gguf, parts_of
from slotwise.model.errors import CheckpointError
from slotwise.model.formats import checkpoint_in, file_error, gguf_in

_HUB_ID = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<quantisation>[\w.-]+))?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_SKIPPED = ("*/*", "consolidated*")  # other formats of the same weights


def locate(model: str | Path) -> Path:
    """A checkpoint's folder, or its GGUF file, the first of a split one.

    A folder that holds one model in GGUF, and no other checkpoint, stands for its file.  A hub id that is not a folder
    here is downloaded, or found in the hub's cache; `owner/name:Q4_K_M` is the GGUF file of this quantisation.

    Raises CheckpointError when there is no such folder or file, it holds something else than a checkpoint, or the hub
    cannot be reached or has no such model.
    """
    given = Path(model).expanduser()
    if given.is_dir():
        return checkpoint_in(given)
    if given.exists():
        if not is_gguf(given):
            raise file_error(given)
        return parts_of(given)[0]
    found = _HUB_ID.fullmatch(str(model))
    if not found:
        raise CheckpointError(f"no folder and no file {model}: give a checkpoint's folder, a GGUF file, or a hub id "
                              "such as owner/name")
    repository, quantisation = found["repository"], found["quantisation"]
    if not quantisation:
        folder = _download(repository, _HUB_FILES, _HUB_SKIPPED)
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(f"the hub's {repository} has no safetensors weights: if it holds models in GGUF, "
                                  f"name one by its quantisation, as {repository}:Q4_K_M")
        return checkpoint_in(folder)
    names = sorted({quantisation, quantisation.upper(), quantisation.lower()})
    patterns = tuple(pattern for name in names for pattern in (
        f"*[-.]{name}.gguf", f"*[-.]{name}-*-of-*.gguf", f"{name}.gguf", f"{name}/*.gguf"))
    return gguf_in(_download(repository, patterns, ()), patterns)


def _download(name: str, patterns: tuple[str, ...], skipped: tuple[str, ...]) -> Path:
    # Imported here: it costs a tenth of a second that a folder does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=list(skipped)))
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {name}, or it needs a login (HF_TOKEN)") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"no folder {name} here, and the hub cannot be reached to download it: give a folder, or connect"
        ) from error
    except (HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot download {name} from the hub: {error!s:.200}") from error

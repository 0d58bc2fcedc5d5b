"""Finds a checkpoint: a folder, or a model id of the Hugging Face hub.  Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from slotwise.model.errors import CheckpointError
from slotwise.model.formats import check_folder, file_error

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_SKIPPED = ["*/*", "consolidated*"]  # other formats of the same weights


def locate(model: str | Path) -> Path:
    """The folder of a checkpoint.  A hub id that is not a folder here is downloaded, or found in the hub's cache.

    Raises CheckpointError when there is no such folder, it holds something else than a checkpoint, or the hub cannot be
    reached or has no such model.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise file_error(folder)
        if not _HUB_ID.fullmatch(str(model)):
            raise CheckpointError(f"no folder {model}: give a checkpoint's folder or a hub id such as owner/name")
        folder = _download(str(model))
    check_folder(folder)
    return folder


def _download(name: str) -> Path:
    # Imported here: it costs a tenth of a second that a folder does not need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {name}, or it needs a login (HF_TOKEN)") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"no folder {name} here, and the hub cannot be reached to download it: give a folder, or connect"
        ) from error
    except (HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot download {name} from the hub: {error!s:.200}") from error

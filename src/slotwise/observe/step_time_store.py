"""Stores step-time models between runs: a small JSON file for each kind of model on each machine."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slotwise.core import step_time
from slotwise.files import PRIVATE, write_whole
from slotwise.observe.step_time import Learned, StepTimeModel

VERSION = 2  # of the stored model; files of other versions are ignored
MAX_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def place(traits: Sequence[str]) -> Path:
    """Returns the file for `traits`, which must include everything that determines the speed of steps."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.blake2b("\n".join(traits).encode(), digest_size=8).hexdigest()
    return Path(home) / "slotwise" / "step-times" / f"{name}-v{VERSION}.json"


def load(path: Path) -> StepTimeModel:
    """Returns the stored model; an empty one if there is no readable file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return StepTimeModel()
        return StepTimeModel(msgspec.json.decode(path.read_bytes(), type=Learned))
    except FileNotFoundError:
        return StepTimeModel()
    except (OSError, ValueError, ArithmeticError) as error:
        logger.warning("step times are learned anew, for %s cannot be used: %s", path, error)
        return StepTimeModel()


def save(path: Path, times: step_time.StepTimeModel) -> None:
    """Stores `times` atomically; logs a warning if the folder is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(times.learned()), PRIVATE)
    except OSError as error:
        logger.warning("step times are not kept: %s", error)

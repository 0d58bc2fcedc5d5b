"""What was learned about step times, kept between runs: a small JSON file for each kind of model on each machine."""

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

VERSION = 2  # of what a model of step times learns; others' files are left alone
MAX_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def place(traits: Sequence[str]) -> Path:
    """Where step times of a model with such `traits` are kept: whatever makes steps faster or slower belongs there."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.blake2b("\n".join(traits).encode(), digest_size=8).hexdigest()
    return Path(home) / "slotwise" / "step-times" / f"{name}-v{VERSION}.json"


def load(path: Path) -> StepTimeModel:
    """A model that knows what an earlier one did; one that knows nothing when there is no file that can be read."""
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
    """Keep what `times` knows, whole or not at all; a folder that cannot be written to is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(times.learned()), PRIVATE)
    except OSError as error:
        logger.warning("step times are not kept: %s", error)

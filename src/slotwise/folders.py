"""The folders of this user for what is kept between runs, and for what is not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

USUAL = "/tmp"  # named where no folder for temporary files can be written


def cache() -> Path:
    """Returns the user's folder of caches, or `temporary` if the user has no home; it may not exist."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the system does not know this user, as in many containers
        return temporary()


def temporary() -> Path:
    """Returns the user's own folder among temporary files; it may not exist, and it may not be possible to make it."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # it tries to write a file: the disk is full or read-only, or files are limited
        folder = USUAL
    return Path(folder) / f"slotwise-{os.geteuid()}"

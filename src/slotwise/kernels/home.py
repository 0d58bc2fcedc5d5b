"""Where compiled kernels are stored.  They are machine code that is loaded, so no other user may be able to write them.

A folder is used if it, every folder above it and every link on the way belong to this user or to root, and no other
user may write there (into a folder above: or replace what is in it, which a sticky bit forbids).  A new one is made
for this user alone.  The folder of the environment comes first, then one in the system's folder for temporary files,
which is checked in the same way.  Only the standard library is imported here.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def wanted() -> Path:
    """The folder of all compiled kernels that the environment names; it may not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("NUMBA_CACHE_DIR") or cache / "slotwise" / "kernels")


def homes() -> list[Path]:
    """Folders for compiled kernels; the first safe one is used."""
    return [wanted(), Path(tempfile.gettempdir()) / f"slotwise-{os.geteuid()}" / "kernels"]


def home() -> Path | None:
    """The first safe folder of `homes`; None: there is none."""
    return next((folder for folder in homes() if not objection(folder)), None)


def objection(folder: Path) -> str:
    """Why other users could change what is in `folder`, which may not exist; empty where they could not."""
    given, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    for path in (given, *given.parents, real, *real.parents):
        try:
            info = path.lstat()
        except OSError:  # missing, or behind a folder closed to this user: it cannot be read either
            continue
        if not is_trusted(info):
            return f"{path} belongs to another user (uid {info.st_uid})"
        is_above = path not in (given, real)
        if stat.S_ISDIR(info.st_mode) and may_be_changed(info) and not (is_above and info.st_mode & stat.S_ISVTX):
            return f"{path} can be changed by other users (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def is_trusted(info: os.stat_result) -> bool:
    """Whether the owner is this user or root, who could change everything anyway."""
    return info.st_uid in (os.geteuid(), 0)


def may_be_changed(info: os.stat_result) -> bool:
    """Whether users other than the owner may write."""
    return bool(info.st_mode & OTHERS_WRITE)


def make(folder: Path) -> None:
    """Make `folder`, and every missing one above it, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    for path in (*reversed(folder.parents), folder):
        try:
            path.mkdir(mode=0o700)
        except OSError:
            if not path.is_dir():
                raise

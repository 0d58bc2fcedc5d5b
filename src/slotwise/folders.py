"""The folders of this user for what is kept between runs, and for what is not; which of them other users can change."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

USUAL = "/tmp"  # named where no folder for temporary files can be written
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


def objection(folder: Path) -> str:
    """Why other users could change what is in `folder`, which may not exist; empty where they could not."""
    given, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    for path in (given, *given.parents, real, *real.parents):
        try:
            info = path.lstat()
        except OSError:  # missing, or behind a folder closed to this user: it cannot be read either
            continue
        if not _is_trusted(info):
            return f"{path} belongs to another user (uid {info.st_uid})"
        is_above = path not in (given, real)
        if stat.S_ISDIR(info.st_mode) and _may_be_changed(info) and not (is_above and info.st_mode & stat.S_ISVTX):
            return f"{path} can be changed by other users (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def file_objection(info: os.stat_result) -> str:
    """Why a file with `info` may be another user's; empty where it is not."""
    if not stat.S_ISREG(info.st_mode):
        return "is not a regular file"
    if not _is_trusted(info):
        return f"belongs to another user (uid {info.st_uid})"
    return "can be changed by other users" if _may_be_changed(info) else ""


def _is_trusted(info: os.stat_result) -> bool:
    """Whether the owner is this user or root, who could change everything anyway."""
    return info.st_uid in (os.geteuid(), 0)


def _may_be_changed(info: os.stat_result) -> bool:
    """Whether users other than the owner may write."""
    return bool(info.st_mode & OTHERS_WRITE)

"""Files: atomic writes, reads with bounds, and the user's own folders with the question who can change them.

A reader finds the old content of a file that is written or the new one, also after a crash.

A checkpoint is data of others: a file of it may be a link to any file of this machine, or a pipe that never ends.  The
cache of the Hugging Face hub consists of links, but into its own folder of blobs:

    models--owner--name/snapshots/REVISION/config.json  ─►  models--owner--name/blobs/DIGEST
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path

from slotwise.errors import printable

PRIVATE = 0o600
PUBLIC = 0o666  # before the process' umask
HUB_REPOSITORY = "models--"  # how its folder's name begins
USUAL = "/tmp"  # named where no folder for temporary files can be written
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # links in these name what is open already


def existing_file(path: str) -> str:
    """Reads a setting that names a file: a pipe might never end, and nothing may write to it.  Raises ValueError."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"must be a regular file, not {printable(path)}")
    return path


def write_output(path: Path | str, data: bytes, mode: int = PUBLIC) -> None:
    """Writes `data` to the output that a command's user has named: as `write_whole`, or into a pipe or a device.

    A terminal, a device or a pipe is written directly, as is `/dev/stdout`; a pipe is waited for until it is read.

    Raises:
        OSError: it cannot be written; a file's old content is unchanged.
    """
    target = Path(path).absolute()
    if (target.exists() and not target.is_file()) or target.parent in STREAMS:
        target.write_bytes(data)
    else:
        write_whole(target, data, mode)


def write_whole(path: Path | str, data: bytes, mode: int = PUBLIC) -> None:
    """Writes `data` to `path`: to a temporary file next to it, synchronized, then renamed; removed on failure.

    A link or a pipe is replaced, and the file that a link names stays as it is.

    Raises:
        OSError: the file cannot be written; the old content is unchanged.
    """
    target = Path(path).absolute()
    unfinished = target.with_name(f".{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(unfinished, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    _synchronize(target.parent)


def _synchronize(folder: Path) -> None:
    """Synchronizes the folder, where the file system supports it, so that the rename is on disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_regular(path: Path | str, most: int) -> bytes:
    """Returns the content of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file (a pipe would be waited for), or is larger.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return data


def has_part(path: Path) -> bool:
    """Whether a checkpoint has a file of this name that may be missing.

    A link to nothing counts, and so does a pipe or a folder: reading it fails, where the model would else be served as
    if its file did not exist, without its chat template for one.
    """
    return os.path.lexists(path)


def read_part(path: Path, most: int) -> bytes:
    """Returns the content of a checkpoint's file, as `read_regular`.

    Raises:
        OSError: as there, or it is a link to a file outside of the checkpoint.
    """
    check_part(path)
    return read_regular(path, most)


def check_part(path: Path) -> None:
    """Raises OSError if a checkpoint's file, which lies in the checkpoint's folder, is a link to one outside of it."""
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    if target.is_relative_to(folder) or _is_blob(target, folder):
        return
    what = f"a link to {target}, outside of the checkpoint: put a copy of the file in its place"
    raise OSError(errno.EPERM, what, str(path))


def _is_blob(target: Path, folder: Path) -> bool:
    """Whether `target` is a blob in the hub's cache: of any of its repositories, or of the one `folder` belongs to."""
    blobs = target.parent
    is_own = folder.parent.name == "snapshots" and blobs.parent == folder.parent.parent
    return blobs.name == "blobs" and (is_own or blobs.parent.name.startswith(HUB_REPOSITORY))


def cache_folder() -> Path:
    """Returns the user's folder of caches, or `temporary_folder` if the user has no home; it may not exist."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the system does not know this user, as in many containers
        return temporary_folder()


def make_private(folder: Path) -> None:
    """Makes `folder`, and every missing one above it, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    for path in (*reversed(folder.parents), folder):
        try:
            path.mkdir(mode=0o700)
        except OSError:
            if not path.is_dir():
                raise


def temporary_folder() -> Path:
    """Returns the user's own folder among temporary files; it may not exist, and it may not be possible to make it."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # it tries to write a file: the disk is full or read-only, or files are limited
        folder = USUAL
    return Path(folder) / f"slotwise-{os.geteuid()}"


def folder_objection(folder: Path) -> str:
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

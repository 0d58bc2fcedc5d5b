"""Atomic writes: a reader finds the old content or the new one, also after a crash.  Reads with bounds.

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
from pathlib import Path

from slotwise.errors import printable

PRIVATE = 0o600
PUBLIC = 0o666  # before the process' umask
HUB_REPOSITORY = "models--"  # how its folder's name begins
STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # links in these name what is open already


def existing_file(path: str) -> str:
    """Reads a setting that names a file: a pipe might never end, and nothing may write to it.  Raises ValueError."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"must be a regular file, not {printable(path)}")
    return path


def write_output(path: Path | str, data: bytes, mode: int = PUBLIC) -> None:
    """Writes `data` to the output that a command's user has named: as `write_whole`, or into what is no file.

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
    """Writes `data` to `path`: to a temporary file beside it, synchronised, then renamed; removed on failure.

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
    _synchronise(target.parent)


def _synchronise(folder: Path) -> None:
    """Synchronises the folder, where the file system supports it, so that the rename is on disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_regular(path: Path | str, most: int) -> bytes:
    """Returns the content of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is no regular file (a pipe would be waited for), or is larger.
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

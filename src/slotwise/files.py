"""Atomic writes: a reader finds the old content or the new one, also after a crash."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o666  # before the process' umask
STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # links in these name what is open already


def write_whole(path: Path | str, data: bytes, mode: int = PUBLIC) -> None:
    """Writes `data` to `path`: to a temporary file beside it, synchronised, then renamed; removed on failure.

    A link is replaced, and the file that it names stays as it is.  A target that is no regular file, such as a
    terminal or a pipe, is written directly, as is `/dev/stdout`.

    Raises:
        OSError: the file cannot be written; the old content is unchanged.
    """
    target = Path(path).absolute()
    if (target.exists() and not target.is_file()) or target.parent in STREAMS:
        target.write_bytes(data)
        return
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

"""Files written whole or not at all: a reader finds the old content or the new one, also after a crash."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o666  # less what the process' umask takes away


def write_whole(path: Path | str, data: bytes, mode: int = PUBLIC) -> None:
    """Writes `data` to `path`: a temporary file beside it, synchronised, then renamed.  It is removed on failure.

    What is no regular file, such as a terminal or a pipe, is written to as it is.

    Raises:
        OSError: it cannot be written; the old content is there as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
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
    """Have the name on disk, too, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

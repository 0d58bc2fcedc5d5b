"""Compiled kernels on disk: a folder for each state of the sources and the machine, a file for each kernel.

    sha256 of what follows, in hexadecimal           64 bytes
    {"name": ..., "symbol": ..., "size": ...}        one line of JSON; size: bytes of the object
    object code                                      as LLVM wrote it

The files are machine code that is loaded, so no other user may be able to write them.  A folder is used if it, every
folder above it and every link on the way belong to this user or to root, and no other user may write there (into a
folder above: or replace what is in it, which a sticky bit forbids).  A new one is made for this user alone.  The folder
of the environment comes first, then one in the system's folder for temporary files, which is checked in the same way.

A file is written whole (a temporary one, flushed to the disk, renamed), so several processes may compile the same
kernel at once.  A file that is damaged, or that other users could have written, counts as missing and is replaced.
Importing this file imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from slotwise.platform import files

# Folders that are kept: there are more only where kernels are changed.
KEPT = 6
# The most bytes of a file; kernels have a hundred thousand.
LARGEST = 1 << 24
# In characters.
DIGEST = 64

NOT_KEPT = ("compiled kernels are not kept, and every start compiles them again; set XDG_CACHE_HOME to a folder that "
            "can be written")

logger = logging.getLogger(__name__)


class ObjectCode(NamedTuple):
    """A kernel's object code, and the symbol of its entry."""

    symbol: str
    code: bytes


class KernelStore:
    """The kernels compiled under one `key`, which names all that their code depends on."""

    def __init__(self, key: str) -> None:
        self._key = key

    @functools.cached_property
    def folder(self) -> Path | None:
        """The folder of these kernels; None if there is no folder that is safe and can be written.

        Warns once if it is not the first of `homes`.
        """
        refused = []
        for root in homes():
            ours = root / self._key
            if why := files.folder_objection(ours):
                refused.append(why)
                continue
            try:
                files.make_private(ours)
                os.utime(ours)
                if not os.environ.get("NUMBA_CACHE_DIR"):  # another application's folder may hold other files
                    remove_unused(root)
            except OSError as error:
                refused.append(f"{root} cannot be written ({error.strerror})")
                continue
            if refused:
                logger.warning("%s: compiled kernels are not loaded from there; they are kept in %s", refused[0], root)
            return ours
        logger.warning("%s: %s", "; ".join(refused), NOT_KEPT)
        return None

    def read(self, name: str) -> ObjectCode | None:
        """The kernel written under `name`; None if it does not exist, or may not be run, which is logged."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                why, data = files.file_objection(os.fstat(file.fileno())), file.read(LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:  # such as a symbolic link
            why, data = f"cannot be read ({error.strerror})", b""
        found = None if why else _parsed(name, data)
        if found is None:
            logger.warning("the compiled kernel %s %s: it is compiled anew", path, why or "is damaged")
        return found

    def write(self, name: str, compiled: ObjectCode) -> None:
        """Write a kernel under `name`, if there is a folder."""
        if self.folder is None:
            return
        index = json.dumps({"name": name, "symbol": compiled.symbol, "size": len(compiled.code)}).encode()
        rest = index + b"\n" + compiled.code
        with contextlib.suppress(OSError):  # such as a full disk: the kernel is compiled again next time
            descriptor, temporary = tempfile.mkstemp(prefix=".", dir=self.folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(rest).hexdigest().encode() + rest)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.folder / name)
            except OSError:
                os.unlink(temporary)
                raise


def wanted() -> Path:
    """The folder of all compiled kernels that the environment names; it may not exist."""
    return Path(os.environ.get("NUMBA_CACHE_DIR") or files.cache_folder() / "slotwise" / "kernels")


def homes() -> list[Path]:
    """Folders for compiled kernels; the first safe one is used."""
    return [wanted(), files.temporary_folder() / "kernels"]


def home() -> Path | None:
    """The first safe folder of `homes`; None if there is no safe one."""
    return next((folder for folder in homes() if not files.folder_objection(folder)), None)


def remove_unused(root: Path) -> None:
    """Remove all but the `KEPT` folders used last."""
    found = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for unused in found[:-KEPT]:
        shutil.rmtree(unused, ignore_errors=True)


def _parsed(name: str, data: bytes) -> ObjectCode | None:
    """The object code that `write` wrote as `data`; None if `write` did not write it."""
    digest, rest = data[:DIGEST], data[DIGEST:]
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    line, _, code = rest.partition(b"\n")
    index = json.loads(line)  # as `write` made it, or the digest would not be right
    return ObjectCode(index["symbol"], code) if (index["name"], index["size"]) == (name, len(code)) else None

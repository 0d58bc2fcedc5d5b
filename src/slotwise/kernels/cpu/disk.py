"""Compiled kernels on disk: a folder for each state of the sources, the processor and the compilers, a file a kernel.

    sha256 of all that follows, in hexadecimal       64 bytes
    {"name": ..., "symbol": ..., "size": ...}        one line of JSON; size: bytes of the object
    object code                                      as LLVM wrote it

A file is written whole (a temporary one, flushed to the disk, renamed), so several processes may compile the same
kernel at once.  A file that is damaged, or that other users could have written, counts as missing and is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

import llvmlite
import numba
import torch
from numba.core.codegen import get_host_cpu_features

from slotwise.kernels.home import homes, is_trusted, make, may_be_changed, objection

KEPT = 6  # folders; there are more only where kernels are changed
LARGEST = 1 << 24  # bytes of a file; kernels have a hundred thousand
DIGEST = 64  # characters

logger = logging.getLogger(__name__)


class Object(NamedTuple):
    """A kernel's object code."""

    symbol: str  # of its entry
    code: bytes


def key() -> str:
    """A digest of all that compiled code depends on: our sources, versions, the processor as Numba and torch see it."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    config = numba.config
    cpu = config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    told = (numba.__version__, llvmlite.__version__, platform.python_version(), cpu, features,
            torch.backends.cpu.get_cpu_capability())
    return hashlib.sha256(sources + "\0".join(told).encode()).hexdigest()[:16]


@functools.cache
def folder() -> Path | None:
    """This process' folder of compiled kernels; None where there is none.  Warns once if it is not the wanted one."""
    refused = []
    for root in homes():
        ours = root / key()
        if why := objection(ours):
            refused.append(why)
            continue
        if refused:
            logger.warning("%s: compiled kernels are not loaded from there; they are kept in %s", refused[0], root)
        try:
            make(ours)
            os.utime(ours)
            if not os.environ.get("NUMBA_CACHE_DIR"):  # another application's folder may hold other files
                remove_unused(root)
        except OSError:
            return None
        return ours
    logger.warning("%s: compiled kernels are not kept", "; ".join(refused))
    return None


def remove_unused(root: Path) -> None:
    """Remove all but the `KEPT` folders used last."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for unused in folders[:-KEPT]:
        shutil.rmtree(unused, ignore_errors=True)


def read(name: str) -> Object | None:
    """The kernel written under `name`; None: there is none, or none that may be run, which is logged."""
    place = folder()
    if place is None:
        return None
    try:
        with open(os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            why, data = _refusal(os.fstat(file.fileno())), file.read(LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:  # a symbolic link, for one
        why, data = f"cannot be read ({error.strerror})", b""
    found = None if why else _parsed(name, data)
    if found is None:
        logger.warning("the compiled kernel %s %s: it is compiled anew", place / name, why or "is damaged")
    return found


def _refusal(info: os.stat_result) -> str:
    """Why a file with `info` is not run; empty: it may be."""
    if not stat.S_ISREG(info.st_mode):
        return "is no file"
    if not is_trusted(info):
        return f"belongs to another user (uid {info.st_uid})"
    return "can be changed by other users" if may_be_changed(info) else ""


def _parsed(name: str, data: bytes) -> Object | None:
    """The object that `write` wrote as `data`; None if `write` did not write it."""
    digest, rest = data[:DIGEST], data[DIGEST:]
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    line, _, code = rest.partition(b"\n")
    index = json.loads(line)  # as `write` made it, or the digest would not be right
    return Object(index["symbol"], code) if (index["name"], index["size"]) == (name, len(code)) else None


def write(name: str, compiled: Object) -> None:
    """Write a kernel under `name`, if there is a folder."""
    place = folder()
    if place is None:
        return
    index = json.dumps({"name": name, "symbol": compiled.symbol, "size": len(compiled.code)}).encode()
    rest = index + b"\n" + compiled.code
    with contextlib.suppress(OSError):  # a full disk, say: it is compiled again next time
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=place)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + rest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, place / name)
        except OSError:
            os.unlink(temporary)
            raise

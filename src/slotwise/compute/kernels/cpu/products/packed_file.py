"""Packed weights on disk: the panels of a model in one file, which is mapped or copied when it is loaded again.

    panels, in the order in which they are packed      each at a multiple of 64 bytes
    [{"what": ..., "size": [...], "at": ...}, ...]     JSON: what a panel is, its dimensions, and where it begins
    bytes of the JSON                                  8 bytes
    sha256 of everything before                        32 bytes

A file's name is a digest of the checkpoint's content and of the code that packs, so a file never has to be changed: it
is written to a temporary name while weights are packed for the first time, synchronized, and renamed.  It is read by
processes of the user who wrote it, which share its pages, and only if its own digest is right.

The folder holds a bounded number of bytes: the files that were used longest ago go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.memory import Fill, HugePages
from slotwise.platform import files

SUFFIX = ".panels"
# In bytes: panels begin at multiples of a line; length of the JSON and digest end a file.
LINE = 64
LENGTH, DIGEST = 8, 32
# The names of files that are being written begin so.  After an hour, in seconds, a killed process has left such a file.
UNFINISHED = ".unfinished-"
HOUR = 3600

logger = logging.getLogger(__name__)


class _PanelWriter:
    """Packs into memory, and writes what was packed to a file."""

    def __init__(self, path: Path, memory: HugePages, most: int) -> None:
        self._path, self._memory, self._most = path, memory, most
        descriptor, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
        self._unfinished = Path(name)
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb")
        self._digest, self._at = hashlib.sha256(), 0
        self._index: list[dict[str, Any]] = []

    def filled(self, what: str, size: tuple[int, ...], fill: Fill) -> Tensor:
        panels = self._memory.filled(what, size, fill)
        self._index.append({"what": what, "size": size, "at": self._at})
        self._write(panels.view(-1).numpy().data, bytes(-panels.nbytes % LINE))
        return panels

    def finish(self) -> None:
        index = json.dumps(self._index).encode()
        self._write(index, len(index).to_bytes(LENGTH, "little"))
        self._write(self._digest.digest())
        if self._file is None:
            return
        if not self._index:
            self.abandon("are none that are multiplied as blocks")
        elif self._at > self._most:
            self.abandon(f"take {self._at:,} bytes, more than the {self._most:,} they may")
        else:
            self._rename(self._file)

    def abandon(self, why: str) -> None:
        """Remove the file."""
        if self._file is not None:
            logger.warning("packed weights are not kept: they %s", why)
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                self._unfinished.unlink()

    def _rename(self, file: BinaryIO) -> None:
        try:
            file.flush()
            os.fsync(file.fileno())
            make_room(self._path.parent, self._most - self._at)
            os.replace(self._unfinished, self._path)
            file.close()
            self._file = None
        except OSError as error:
            self.abandon(f"cannot be written: {error.strerror}")

    def _write(self, *pieces: bytes | memoryview) -> None:
        if self._file is None:
            return
        if self._at > self._most:
            self.abandon(f"take more than the {self._most:,} bytes they may")
            return
        try:
            for piece in pieces:
                self._file.write(piece)
                self._digest.update(piece)
                self._at += len(piece)
        except OSError as error:
            self.abandon(f"cannot be written: {error.strerror}")


class _MappedPanels:
    """Panels of a mapped file.

    Args:
        data: the file's bytes, uint8.
        index: its JSON.
        memory: for panels that the file lacks and, if `copies`, for all.
    """

    def __init__(
        self, path: Path, data: Tensor, index: list[dict[str, Any]], memory: HugePages, *, copies: bool
    ) -> None:
        self._path, self.data, self._memory, self._copies = path, data, memory, copies
        self._index = iter(index)

    def filled(self, what: str, size: tuple[int, ...], fill: Fill) -> Tensor:
        found = next(self._index, None)
        if found is None or found["what"] != what or tuple(found["size"]) != size:
            self._refuse()
            return self._memory.filled(what, size, fill)
        at = found["at"]
        panels = self.data[at : at + torch.Size(size).numel()].view(size)
        return self._memory.copy(panels).view(size) if self._copies else panels

    def finish(self) -> None:
        if next(self._index, None) is not None:
            self._refuse()
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def _refuse(self) -> None:
        """Pack the rest anew: the file belongs to a model that was built differently, such as without adapters."""
        logger.warning("packed weights in %s are not those of this model: the file is removed", self._path)
        self._index = iter(())
        with contextlib.suppress(OSError):
            self._path.unlink()


def home() -> Path:
    """The folder of packed weights; it may not exist."""
    return files.cache_folder() / "slotwise" / "packed-weights"


def is_kept(key: str) -> bool:
    """Whether there is a file of `key`; it may be damaged."""
    return (home() / f"{key}{SUFFIX}").exists()


@contextmanager
def kept(launcher: KernelLauncher, key: str, most: int, *, copies: bool = False) -> Iterator[bool]:
    """While active, takes panels from the file of `key`, or packs them and writes that file.

    Yields whether the file was there.  If the folder is not safe or cannot be written, a warning is logged, and weights
    are packed without a file.

    Args:
        most: bytes of all files.
        copies: panels are copied to huge pages; else the file stays mapped, and takes no memory of this process alone.
    """
    folder = home()
    path = folder / f"{key}{SUFFIX}"
    if why := files.folder_objection(folder):
        logger.warning("packed weights are not kept: %s", why)
        yield False
        return
    memory = launcher.weights
    try:
        found = _open(path, memory, copies=copies)
        panels = found or _record(path, memory, most)
    except OSError as error:
        logger.warning("packed weights are not kept: %s: %s", folder, error.strerror)
        yield False
        return
    launcher.panels = panels
    if found is not None and not copies:
        launcher.mapped.append(found.data)
    try:
        yield found is not None
        panels.finish()
    finally:
        launcher.panels = memory
        if isinstance(panels, _PanelWriter):
            panels.abandon("were not all packed")


def _record(path: Path, memory: HugePages, most: int) -> _PanelWriter:
    files.make_private(path.parent)
    return _PanelWriter(path, memory, most)


def _open(path: Path, memory: HugePages, *, copies: bool) -> _MappedPanels | None:
    """The panels of a file; None if it does not exist or is damaged, which is logged."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return None
    if why := files.file_objection(about):  # another user could change it while it is mapped
        logger.warning("packed weights in %s: it %s: they are packed anew", path, why)
        path.unlink()
        return None
    data = _map(path, about.st_size)
    index = _index_of(data.numpy().data)
    if index is None:
        logger.warning("packed weights in %s are damaged: they are packed anew", path)
        path.unlink()
        return None
    return _MappedPanels(path, data, index, memory, copies=copies)


def _map(path: Path, size: int) -> Tensor:
    """A file's bytes; empty if it is too small to be complete, or cannot be mapped."""
    data = torch.tensor([], dtype=torch.uint8)
    if size > LENGTH + DIGEST:
        with contextlib.suppress(RuntimeError):  # of torch, for every fault
            storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
            data = data.set_(storage)
    return data


def _index_of(data: memoryview) -> list[dict[str, Any]] | None:
    """The index of a file; None if the file is incomplete."""
    body = data[:-DIGEST]
    if hashlib.sha256(body).digest() != data[-DIGEST:]:
        return None
    end = len(body) - LENGTH
    size = int.from_bytes(body[end:], "little")
    found: list[dict[str, Any]] = json.loads(bytes(body[end - size : end]))  # as it was written, by the digest
    return found


def make_room(folder: Path, most: int) -> None:
    """Remove the files used longest ago until at most `most` bytes are left, and what killed processes left behind."""
    now = time.time()
    for each in folder.glob(f"{UNFINISHED}*"):
        if each.stat().st_mtime < now - HOUR:
            each.unlink(missing_ok=True)
    found = sorted(((each.stat(), each) for each in folder.glob(f"*{SUFFIX}")), key=lambda pair: pair[0].st_mtime)
    total = sum(about.st_size for about, _ in found)
    for about, each in found:
        if total <= most:
            return
        each.unlink(missing_ok=True)
        total -= about.st_size

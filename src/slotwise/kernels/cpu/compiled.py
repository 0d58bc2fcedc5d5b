"""Compiles Python functions of integers to C callbacks, at first use; the code is cached on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from numba import cfunc
from numba.core.sigutils import normalize_signature

from slotwise.kernels import compile_worker
from slotwise.kernels.cpu import disk, objects

_known: dict[str, Compiled] = {}


class Compiled:
    """A function of addresses and integers as machine code."""

    def __init__(self, function: Callable[..., None], signature: object) -> None:
        self.name = f"{function.__module__}.{function.__name__}"
        self._function = function
        self._signature = signature
        self._lock = threading.Lock()
        _known[self.name] = self

    @functools.cached_property
    def _file(self) -> str:
        """The name of the code on disk."""
        state = hashlib.sha256(Path(self._function.__code__.co_filename).read_bytes()).hexdigest()[:8]
        return f"{self.name}-{state}"

    @property
    def is_on_disk(self) -> bool:
        """Whether valid code is on disk, so that it need only be read."""
        return disk.read(self._file) is not None

    def compile(self) -> None:
        """Compile now rather than at first use."""
        self.address  # noqa: B018

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code."""
        with self._lock:  # the warm-up thread and the first step may both call this
            return self.__dict__.get("address") or self._ready()

    def _ready(self) -> int:
        """Read from disk and link, or compile and write."""
        kept = disk.read(self._file)
        if kept is not None:
            return objects.link(kept)
        self._compiled = cfunc(self._signature, nopython=True)(self._function)
        disk.write(self._file, objects.object_of(self._compiled))
        return self._compiled.address

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """The code as a function of Python integers; it runs without the interpreter's lock."""
        arguments, _ = normalize_signature(self._signature)
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(self.address)


def compile_all(codes: Sequence[Compiled]) -> None:
    """Compile or load all `codes`.  What is not on disk is compiled by as many processes as there are processors.

    Args:
        codes: the slowest to compile first.
    """
    missing = [code for code in codes if not code.is_on_disk]
    processors = len(os.sched_getaffinity(0)) if disk.folder() else 1
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder)
        number = max(0, min(processors, len(missing)) - 1)
        called = compile_worker.set_to_work(number, claims, [code.name for code in missing])
        _share(claims, missing)
        for helper in called:
            helper.wait()  # if it failed, its claims are compiled below
    for code in codes:
        code.compile()


def share_named(claims: Path, names: Sequence[str]) -> None:
    """A worker's part of `compile_all`."""
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
    _share(claims, [_known[name] for name in names])


def _share(claims: Path, codes: Sequence[Compiled]) -> None:
    """Compile the kernels that no other process has claimed."""
    for code in codes:
        with contextlib.suppress(FileExistsError):
            (claims / code.name).touch(exist_ok=False)
            code.compile()

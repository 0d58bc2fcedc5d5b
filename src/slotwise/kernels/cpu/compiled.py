"""Compiling Python functions to C callbacks, at first use, kept on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from numba import cfunc

from slotwise.kernels import helpers
from slotwise.kernels.cpu import disk

_known: dict[str, Compiled] = {}


class Compiled:
    """A function of addresses and integers as machine code."""

    def __init__(self, function: Callable[..., None], signature: object) -> None:
        self.name = f"{function.__module__}.{function.__name__}"
        self._function = function
        self._signature = signature
        _known[self.name] = self

    @functools.cached_property
    def _code(self):
        mark = self._mark
        try:
            code = cfunc(self._signature, nopython=True, cache=True)(self._function)
            mark.touch()
            return code
        except (RuntimeError, OSError):  # nowhere to keep it
            return cfunc(self._signature, nopython=True)(self._function)

    @functools.cached_property
    def _mark(self) -> Path:
        """There once the code is on disk."""
        state = hashlib.sha256(Path(self._function.__code__.co_filename).read_bytes()).hexdigest()[:8]
        return disk.folder() / f"{self.name}-{state}"

    @property
    def is_on_disk(self) -> bool:
        """Whether it was compiled before, so that it need only be read."""
        return self._mark.exists()

    def compile(self) -> None:
        """Compile now rather than at first use."""
        self.address  # noqa: B018

    @functools.cached_property
    def address(self) -> int:
        """Where the machine code starts."""
        return self._code.address

    @functools.cached_property
    def call(self) -> Callable[..., None]:
        """The code as a function of Python integers; it runs without the interpreter's lock."""
        return self._code.ctypes


def compile_all(codes: Sequence[Compiled]) -> None:
    """Have all of them ready.  What is not on disk is compiled by as many processes as there are processors.

    Args:
        codes: those that take longest first.
    """
    missing = [code for code in codes if not code.is_on_disk]
    processors = len(os.sched_getaffinity(0)) if disk.folder().exists() else 1
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder)
        number = max(0, min(processors, len(missing)) - 1)
        called = helpers.set_to_work(number, claims, [code.name for code in missing])
        _share(claims, missing)
        for helper in called:
            helper.wait()  # if it failed, what it claimed is compiled below
    for code in codes:
        code.compile()


def share_named(claims: Path, names: Sequence[str]) -> None:
    """A helper's part."""
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
    _share(claims, [_known[name] for name in names])


def _share(claims: Path, codes: Sequence[Compiled]) -> None:
    """Compile whatever no other process has claimed."""
    for code in codes:
        with contextlib.suppress(FileExistsError):
            (claims / code.name).touch(exist_ok=False)
            code.compile()

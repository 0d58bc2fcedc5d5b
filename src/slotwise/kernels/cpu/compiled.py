"""Compiling Python functions to C callbacks, at first use, kept on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from numba import cfunc

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

    Compiling is Python's work for the greater part, which threads would not share out.

    Args:
        codes: those that take longest first.
    """
    missing = [code for code in codes if not code.is_on_disk]
    with tempfile.TemporaryDirectory() as claims:
        command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import help_out; help_out()", claims]
        num_helpers = min(len(os.sched_getaffinity(0)), len(missing)) - 1 if disk.folder().exists() else 0
        helpers = [subprocess.Popen([*command, *(code.name for code in missing)]) for _ in range(num_helpers)]
        _share(Path(claims), missing)
        for helper in helpers:
            helper.wait()  # if it failed, what it claimed is compiled below
    for code in codes:
        code.compile()


def help_out() -> None:
    """A helper's part; its arguments are a folder of claims and the names of what is to be compiled."""
    claims, *names = sys.argv[1:]
    for name in names:
        importlib.import_module(name.rpartition(".")[0])
    _share(Path(claims), [_known[name] for name in names])


def _share(claims: Path, codes: Sequence[Compiled]) -> None:
    """Compile whatever no other process has claimed."""
    for code in codes:
        with contextlib.suppress(FileExistsError):
            (claims / code.name).touch(exist_ok=False)
            code.compile()

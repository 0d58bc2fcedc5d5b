"""Compiling Python functions to C callbacks, at first use, kept on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numba
from numba import cfunc


def _keep_code_on_disk() -> None:
    """Numba's disk cache watches one source file a function; ours inline each other, so one folder per state of all."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(numba.config.CACHE_DIR or Path(home) / "slotwise" / "kernels")
    if root.name != digest:
        numba.config.CACHE_DIR = str(root / digest)


_keep_code_on_disk()


class Compiled:
    """A function of addresses and integers as machine code."""

    def __init__(self, function: Callable[..., None], signature: object) -> None:
        self._function = function
        self._signature = signature

    @functools.cached_property
    def _code(self):
        try:
            return cfunc(self._signature, nopython=True, cache=True)(self._function)
        except RuntimeError:  # nowhere to keep it
            return cfunc(self._signature, nopython=True)(self._function)

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


def compile_beside(longest: Compiled, others: Sequence[Compiled]) -> None:
    """Compile all of them; the first time on a machine, `longest` in a process of its own beside the others.

    Compiling is Python's work for the greater part, which threads would not share out.
    """
    name = f"{longest._function.__module__}.{longest._function.__name__}"
    done = Path(numba.config.CACHE_DIR) / f"{name}.compiled"
    helper = None if done.exists() else subprocess.Popen([sys.executable, "-W", "ignore", "-m", __name__, name])
    for code in others:
        code.compile()
    if helper is not None:
        helper.wait()  # if it failed, the next line does its work
    longest.compile()
    with contextlib.suppress(OSError):
        done.touch()


def _compile_by_name(name: str) -> None:
    module, _, function = name.rpartition(".")
    Compiled(getattr(importlib.import_module(module), function), "void(int64)").compile()


if __name__ == "__main__":
    _compile_by_name(sys.argv[1])

"""Compiling Python functions to C callbacks, at first use, kept on disk."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
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

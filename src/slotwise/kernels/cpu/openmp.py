"""Kernels on torch's own OpenMP threads.

Numba's parallel loops may bring a second OpenMP library into the process; its threads and torch's then spin against
each other for the same cores.  So a kernel here is a plain C callback, started through the `GOMP_parallel` that torch
itself is linked with (libgomp, and libomp and libiomp5 by their compatibility entry).  Where there is none the kernel
runs on the calling thread, which is slower and nothing else.

A callback receives the address of an int64 array, the same on every thread: `HEADER` words of shared counters, zero at
the start, then its arguments.  Threads take work by `fetch_add` on a counter, so that a busy core does less of it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slotwise.kernels.cpu.compiled import Compiled

if TYPE_CHECKING:
    from slotwise.kernels.cpu.recording import Recorder

HEADER = 16  # int64 words: work is counted in word 0, threads in word 8, each on a cache line of its own
THREAD_COUNTER = 64  # bytes from the start of the block
MAX_ARGUMENTS = 24


_COUNTERS = struct.Struct(f"{8 * HEADER}x")
_ARGUMENTS = [struct.Struct(f"{count}q") for count in range(MAX_ARGUMENTS + 1)]


@functools.cache
def team_size_address() -> int:
    """Of the function that says how many threads run beside the caller, itself included; 0 where none ever do.

    OpenMP may start fewer than it was asked for.
    """
    start = _gomp_parallel()
    if start is None:
        return 0
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / start.library))
    return ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value or 0


@functools.cache
def _gomp_parallel() -> Callable[..., None] | None:
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                start = ctypes.CDLL(str(path)).GOMP_parallel
            except (OSError, AttributeError):
                return None
            start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            start.restype = None
            start.library = name
            return start
    return None


class Team:
    """Threads that work together, the words they are given and the memory they work in.  One caller at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.recorder: Recorder | None = None
        self._block, self._address = aligned(HEADER + MAX_ARGUMENTS, np.int64)
        self._scratch, self._scratch_address = aligned(0, np.float32)

    def give(self, *arguments: int) -> None:
        """Set the arguments of what runs next, and the counters to zero."""
        _COUNTERS.pack_into(self._block, 0)
        _ARGUMENTS[len(arguments)].pack_into(self._block, 8 * HEADER, *arguments)
        self._given = len(arguments)

    def together(self, code: Compiled) -> None:
        """Run on all threads and wait for them."""
        if self.recorder is not None:
            self._note(code, is_alone=False)
        start = _gomp_parallel()
        if self.threads == 1 or start is None:
            code.call(self._address)
        else:
            start(code.address, self._address, self.threads, 0)

    def alone(self, code: Compiled) -> None:
        """Run on the calling thread."""
        if self.recorder is not None:
            self._note(code, is_alone=True)
        code.call(self._address)

    def empty(self, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """An uninitialised tensor for what a kernel yields."""
        return torch.empty(size, dtype=kind) if self.recorder is None else self.recorder.empty(size, kind)

    def scratch(self, floats: int) -> int:
        """Address of at least so many float32 words, until the next call."""
        if len(self._scratch) < floats:
            self._scratch, self._scratch_address = aligned(floats, np.float32)
        return self._scratch_address

    def _note(self, code: Compiled, *, is_alone: bool) -> None:
        assert self.recorder is not None
        words = self._block[HEADER : HEADER + self._given].tobytes()
        self.recorder.note(code, words, self._scratch, is_alone=is_alone)


def aligned(size: int, kind: type) -> tuple[np.ndarray, int]:
    """An array of `size` zeros that starts on a cache line, and where it starts."""
    width = np.dtype(kind).itemsize
    room = np.zeros(size + 64 // width, kind)
    skip = -room.ctypes.data % 64 // width
    return room[skip : skip + size], room.ctypes.data + skip * width

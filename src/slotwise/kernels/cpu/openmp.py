"""Torch's own OpenMP: its threads, for kernels that run between torch's products, and the places they are bound to.

Another pool's threads would compete with torch's, which spin on the same cores for milliseconds after each product.
So such a kernel is started through the `GOMP_parallel` that torch itself is linked with (libgomp, and libomp and
libiomp5 by their compatibility entry).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path

import torch


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The library with OpenMP's functions, if this torch has any."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                library.GOMP_parallel.restype = None
                return library if library.omp_get_num_places else None
            except (OSError, AttributeError):
                return None
    return None


class TorchThreads:
    """Up to `threads` of torch's threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words` on every thread; returns when all have returned."""
        library = _library()
        assert library is not None
        library.GOMP_parallel(code, words, self._threads, 0)


def torch_threads(threads: int) -> TorchThreads | None:
    """None where torch has no OpenMP."""
    return None if _library() is None else TorchThreads(threads)


def places() -> list[frozenset[int]]:
    """The processors of each OpenMP place, starting with the first thread's; empty where threads are not bound."""
    library = _library()
    if library is None or not library.omp_get_proc_bind():
        return []
    count, first = library.omp_get_num_places(), max(0, library.omp_get_place_num())
    return [_processors(library, (first + number) % count) for number in range(count)]


def roam() -> None:
    """Allow the calling thread on all of OpenMP's places: a thread inherits the one core of a bound thread."""
    if (bound := places()) and sys.platform == "linux":
        with contextlib.suppress(OSError):  # not permitted: the thread works where it is
            os.sched_setaffinity(0, frozenset().union(*bound))


def _processors(library: ctypes.CDLL, place: int) -> frozenset[int]:
    numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
    library.omp_get_place_proc_ids(place, numbers)
    return frozenset(numbers)

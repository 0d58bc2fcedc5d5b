"""Torch's own OpenMP: its threads, for kernels that run between products of torch, and the places where they are bound.

Another pool's threads would find torch's still looking for work on the same cores, milliseconds after each product.  So
there a kernel is started through the `GOMP_parallel` that torch itself is linked with (libgomp, and libomp and libiomp5
by their compatibility entry).
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
    """What knows OpenMP's functions, if this torch has any."""
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
    """As many of torch's threads as there are, up to `threads`."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def run(self, code: int, words: int) -> None:
        """Call the kernel at `code` with `words` on every thread; return when all have been there."""
        library = _library()
        assert library is not None
        library.GOMP_parallel(code, words, self._threads, 0)


def torch_threads(threads: int) -> TorchThreads | None:
    """None where they cannot be had."""
    return None if _library() is None else TorchThreads(threads)


def places() -> list[frozenset[int]]:
    """The processors of each place that OpenMP binds threads to, its first thread's first; empty where it does not."""
    library = _library()
    if library is None or not library.omp_get_proc_bind():
        return []
    count, first = library.omp_get_num_places(), max(0, library.omp_get_place_num())
    return [_processors(library, (first + number) % count) for number in range(count)]


def roam() -> None:
    """Let the calling thread go wherever OpenMP's may: one started by a thread that is bound is bound to its core."""
    if (bound := places()) and sys.platform == "linux":
        with contextlib.suppress(OSError):  # where it is not allowed, work is done all the same
            os.sched_setaffinity(0, frozenset().union(*bound))


def _processors(library: ctypes.CDLL, place: int) -> frozenset[int]:
    numbers = (ctypes.c_int * library.omp_get_place_num_procs(place))()
    library.omp_get_place_proc_ids(place, numbers)
    return frozenset(numbers)

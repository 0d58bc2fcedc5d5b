"""Memory of the CPU's kernels: aligned arrays, huge pages for weights, and pages allocated when or before written."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Bytes of a huge page, and of the pages that weights reserve at once: pages without a write take no memory.
LARGE = 2 << 20
WEIGHTS_AT_ONCE = 16 * LARGE
# MADV_POPULATE_WRITE of Linux 5.14, which has no name in Python, and MADV_DONTNEED; elsewhere it has no effect.
POPULATE_WRITE = 23
DONT_NEED = 4
# Parameters of the GNU C library's `mallopt`, and the largest values that it chooses by itself.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST_MAPPED, MOST_KEPT = 32 << 20, 64 << 20
_C = ctypes.CDLL(None)


def aligned(size: int, kind: type[np.generic]) -> tuple[NDArray[Any], int]:
    """An array of `size` zeros that starts on a cache line, and its address."""
    width = np.dtype(kind).itemsize
    room = np.zeros(size + 64 // width, kind)
    skip = -room.ctypes.data % 64 // width
    return room[skip : skip + size], room.ctypes.data + skip * width


def untouched_pages(size: int) -> mmap.mmap:
    """`size` bytes of zeros that take no memory before they are written, as `torch.zeros` would.

    Advises huge pages: scattered reads of small ones would miss the TLB.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def keep_freed() -> None:
    """Keep up to 64 MiB of freed memory for the next step.  Without the GNU C library it has no effect.

    That library returns the end of its heap to the system as soon as twice the size of the largest mapping freed so far
    is free there, and the kernel clears each page that is used again.  Of a model with small weights that happens in
    every layer: 2,200 page faults in a step of 450 tokens, of which each costs 2 us.  These are the values that it
    takes by itself with large weights.
    """
    if (mallopt := getattr(_C, "mallopt", None)) is not None:
        mallopt(MMAP_THRESHOLD, MOST_MAPPED)
        mallopt(TRIM_THRESHOLD, MOST_KEPT)


def populate(address: int, size: int) -> bool:
    """Allocate `size` bytes at `address` now, with their contents unchanged; False where the system cannot.

    Safe while other threads read and write there; releases the interpreter's lock.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    asked = ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(POPULATE_WRITE)
    return bool(_C.madvise(*asked) == 0) if hasattr(_C, "madvise") else False


def discard(address: int, size: int) -> None:
    """Give the memory of `size` bytes at `address`, where a mapping begins, back to the system.

    They become zeros again, or the contents of the mapped file.

    Raises:
        OSError: the system cannot do that.
    """
    asked = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(DONT_NEED)
    if not hasattr(_C, "madvise") or _C.madvise(*asked):
        raise OSError("the system does not take the memory of a mapping back")


Fill = Callable[[Tensor], None]
"""Writes all of a tensor."""


class Panels(Protocol):
    """Where panels of packed weights lie."""

    def filled(self, what: str, size: tuple[int, ...], fill: Fill) -> Tensor:
        """A tensor of bytes, of `size`, filled by `fill`; `what` names all that it depends on except the weights."""
        ...


class HugePages:
    """Tensors one after another in huge pages; memory is returned with the last tensor in it.

    Pages of their own would be small pages, because most matrices are not a multiple of a huge page.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, *size: int) -> Tensor:
        """A contiguous tensor `size` of uint8, at an address that is a multiple of 64."""
        number = math.prod(size)
        needed = -(-number // 64) * 64
        if len(self._free) < needed:
            pages = untouched_pages(max(WEIGHTS_AT_ONCE, -(-needed // LARGE) * LARGE))
            self._free = torch.frombuffer(pages, dtype=torch.uint8)
        place, self._free = self._free[:number], self._free[needed:]
        return place.view(size)

    def filled(self, what: str, size: tuple[int, ...], fill: Fill) -> Tensor:
        """`Panels.filled`, filled now."""
        panels = self.empty(*size)
        fill(panels)
        return panels

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in these pages."""
        return self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

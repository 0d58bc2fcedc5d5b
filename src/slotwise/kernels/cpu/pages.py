"""Memory whose pages are allocated at the first write, or shortly before."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

LARGE = 2 << 20  # bytes of a huge page, where there are any
_C = ctypes.CDLL(None)
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it


def untouched_pages(size: int) -> mmap.mmap:
    """`size` bytes of zeros that take no memory before they are written, as `torch.zeros` would.

    Advises huge pages: scattered reads of small ones would miss the TLB.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def populate(address: int, size: int) -> bool:
    """Allocate `size` bytes at `address` now, with their contents unchanged; False where the system cannot.

    Safe while other threads read and write there; releases the interpreter's lock.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    asked = ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(POPULATE_WRITE)
    return bool(_C.madvise(*asked) == 0) if hasattr(_C, "madvise") else False

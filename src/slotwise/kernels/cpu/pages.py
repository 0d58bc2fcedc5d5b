"""Memory that the system gives page by page, when each is first written, or a little before."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

LARGE = 2 << 20  # bytes of a large page, where there are any
_C = ctypes.CDLL(None)
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it


def untouched_pages(size: int) -> mmap.mmap:
    """`size` bytes of zeros that take no memory before they are written, as `torch.zeros` would.

    Large pages where the system has them for those who ask: whoever reads here and there would first have to find out
    where each small page is.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def populate(address: int, size: int) -> bool:
    """Have the system give `size` bytes of `address` now, as they are; False where it cannot be asked to.

    Safe while others read and write there, and done without the interpreter's lock.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    asked = ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(POPULATE_WRITE)
    return bool(_C.madvise(*asked) == 0) if hasattr(_C, "madvise") else False

"""Memory shared by threads."""

from __future__ import annotations

import numpy as np


def aligned(size: int, kind: type) -> tuple[np.ndarray, int]:
    """An array of `size` zeros that starts on a cache line, and its address."""
    width = np.dtype(kind).itemsize
    room = np.zeros(size + 64 // width, kind)
    skip = -room.ctypes.data % 64 // width
    return room[skip : skip + size], room.ctypes.data + skip * width

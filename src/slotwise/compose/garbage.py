"""Pauses of Python's garbage collector, kept short."""

from __future__ import annotations

import gc


def settle() -> None:
    """Look once through everything that was loaded, and never again.

    A full collection walks all objects there are, and a process that has imported what we need holds hundreds of
    thousands that will live as long as it does: a pause of a tenth of a second in the middle of a stream.
    """
    gc.collect()
    gc.freeze()

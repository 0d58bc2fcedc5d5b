"""Leaves the engine's first core to the engine.

The engine's main thread leads every kernel, and is bound to a core (`compose.launch.THREADS_STAY`).  Whatever the API
process does on that core, each step waits for, to the last microsecond.  On any other it takes from a helper, which is
as nice as can be and waited for only while it holds work (`kernels.cpu.threads`).  So this process keeps off the one
core:

    core 0    engine: main thread ……………………………………………………………………………
    core 1    engine: a helper …… │ API process │ …… a helper …………… │ API process │ ……

Where that thread is bound to nothing, or to all there is, everybody goes everywhere, as the system likes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


class Cores:
    """Those that this process had when it was asked for the first time; it takes no others."""

    def __init__(self) -> None:
        self._all = self._ours = _of(0)

    def leave_to(self, engine: int) -> None:
        """Keep every thread of this process off the cores to which the main thread of process `engine` is bound."""
        self._ours = self._all - _of(engine) or self._all
        if self._ours != self._all:
            for thread in os.listdir("/proc/self/task"):
                _move(int(thread), self._ours)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A process started in here may use them all."""
        before = _of(0)
        if before != self._ours:  # somebody moved this process, and will have known why
            yield
            return
        _move(0, self._all)
        try:
            yield
        finally:
            _move(0, before)


def _of(thread: int) -> frozenset[int]:
    """The cores of a thread, 0 for the calling one, or of a process' main thread; empty where that cannot be told."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return frozenset(os.sched_getaffinity(thread))
    return frozenset()


def _move(thread: int, cores: frozenset[int]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has ended, or nobody may be moved here: it serves all the same
            os.sched_setaffinity(thread, cores)

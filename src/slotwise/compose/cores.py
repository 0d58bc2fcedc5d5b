"""Keeps the API process off the core of the engine's main thread.

The engine's main thread leads every kernel, and is bound to a core (`compose.launch.THREADS_STAY`).  Time that the API
process takes on that core delays each step in full.  On any other core it delays only a helper thread, which has the
lowest priority and is waited for only while it holds work (`kernels.cpu.threads`).  So this process avoids one core:

    core 0    engine: main thread ……………………………………………………………………………
    core 1    engine: a helper …… │ API process │ …… a helper …………… │ API process │ ……

Where that thread is bound to no core, or to all cores, nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


class Cores:
    """The cores of this process: a subset of those it had when this was created."""

    def __init__(self) -> None:
        self._all = self._ours = _of(0)

    def leave_to(self, engine: int) -> None:
        """Keeps all threads of this process off the cores to which the main thread of process `engine` is bound."""
        self._ours = self._all - _of(engine) or self._all
        if self._ours != self._all:
            with contextlib.suppress(OSError):  # a system without /proc: the threads stay where they are
                for thread in os.listdir("/proc/self/task"):
                    _move(int(thread), self._ours)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """A process started in this context may use all cores."""
        before = _of(0)
        if before != self._ours:  # the affinity was changed from outside: leave it
            yield
            return
        _move(0, self._all)
        try:
            yield
        finally:
            _move(0, before)


def _of(thread: int) -> frozenset[int]:
    """Returns the cores of a thread, 0: the calling one, or of a process' main thread; empty if unavailable."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return frozenset(os.sched_getaffinity(thread))
    return frozenset()


def _move(thread: int, cores: frozenset[int]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the thread has ended or may not be moved: not an error
            os.sched_setaffinity(thread, cores)

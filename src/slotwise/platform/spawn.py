"""Starts child processes that signals of the terminal do not reach, and kills them where this process ends at once."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from slotwise.platform import child

PR_SET_PDEATHSIG = 1  # of Linux' prctl

_started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts `command` in `child.HOME` with `child.environment()`, and SIGINT and SIGHUP blocked.

    A terminal sends them to children, too, which would end before they can set a handler.  The parent decides what
    ends.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        OSError: it could not be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])  # inherited
    try:
        process = subprocess.Popen(command, **({"env": child.environment(), "cwd": child.HOME} | options))
        _started.add(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def end_on_interrupt() -> None:
    """From here on Ctrl-C ends this process, started by `start`, without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def end_with_parent() -> None:
    """From here on the system kills this process when the thread that started it ends, however that is."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_all() -> None:
    """Kills the children that `start` has started and that have not ended."""
    for process in list(_started):
        process.kill()

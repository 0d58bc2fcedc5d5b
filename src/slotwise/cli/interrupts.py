"""Ctrl-C while a command loads: one line, exit status 130, no process left.

Importing libraries and building an engine take seconds, in code that an exception from a signal may find anywhere: a
library turns it into another error, or a thread that still compiles aborts the process.  So until the engine is ready
the signal ends the process at once.  Children do not see it (`spawn.start`): they are killed here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # exit status


def end_at_once(form: Callable[[str], str] = str) -> None:
    """From here on an interrupt ends this process with one line, unless interrupts are ignored or handled already.

    Args:
        form: makes the line of what it says.
    """
    if _handler() is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Ending(form))


def raise_again() -> None:
    """From here on an interrupt raises KeyboardInterrupt again.  Does nothing unless `end_at_once` is in force."""
    if isinstance(handler := _handler(), _Ending):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        handler.close()


@contextlib.contextmanager
def ending_at_once(form: Callable[[str], str] = str) -> Iterator[None]:
    """Within this context an interrupt ends the process with one line, as `end_at_once`."""
    end_at_once(form)
    try:
        yield
    finally:
        raise_again()


def leave(status: int) -> NoReturn:
    """Ends this process after a failure, without waiting for threads and children that still compile."""
    _kill_children()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(status)


def _handler() -> object:
    """The handler of SIGINT; None in a thread, which may not set one."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None


class _Ending:
    """The handler that ends this process.  It keeps the present stderr: a tokenizer loads while that is discarded."""

    def __init__(self, form: Callable[[str], str]) -> None:
        self._form = form
        try:
            self._stderr = os.dup(2)
        except OSError:  # it is closed
            self._stderr = os.open(os.devnull, os.O_WRONLY)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _kill_children()
        start = "\n" if os.isatty(self._stderr) else ""  # after what the terminal or a progress bar shows
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{start}{self._form(f'slotwise{_command()}: interrupted')}\n".encode())
        os._exit(INTERRUPTED)

    def close(self) -> None:
        os.close(self._stderr)


def _kill_children() -> None:
    if kill_all := getattr(sys.modules.get("slotwise.spawn"), "kill_all", None):  # imported with the first child
        kill_all()


def _command() -> str:
    return f" {sys.argv[1]}" if len(sys.argv) > 1 and sys.argv[1].isalpha() else ""

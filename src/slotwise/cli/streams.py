"""Standard streams that a command was started without: what it opens next would take their numbers."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Opens the null device in the place of standard input, output and error that are closed, also for children."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, this one
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))

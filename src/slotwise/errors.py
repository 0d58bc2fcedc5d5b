"""Errors with a message of one printable line, whatever a damaged file or a library put into it; throttled warnings."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

MOST_CHARACTERS = 500  # of a message
WARNING_EVERY = 60.0  # seconds between two throttled warnings


def printable(text: str) -> str:
    """Returns `text` with control characters, lone surrogates and all else that is not printable escaped."""
    return text if text.isprintable() else "".join(
        [c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


def one_line(message: str) -> str:
    """Returns `message` as one line of at most `MOST_CHARACTERS`, without control characters or lone surrogates."""
    line = " ".join(message[: 8 * MOST_CHARACTERS].split())
    shown = printable(line[:MOST_CHARACTERS + 1])
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 4] + " ..."


def described(error: BaseException) -> str:
    """Returns what an error says, without a bare error number, and never nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) and not str(error):
        return "there is not enough memory"
    return str(error) or type(error).__name__


def nearest(name: str, names: Collection[str]) -> str:
    """Returns the one of `names` that is nearest to `name`, "" where none is near."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1)), "")


class OneLineError(Exception):
    """The message is one line, and can be printed and sent between processes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class CheckpointError(OneLineError):
    """The checkpoint cannot be served.  The message is one line, fit for a command line or an API error."""


class ThrottledWarning:
    """A warning that clients can cause at will: written at most once a minute, with the number of times it was due.

    Args:
        logger: receives the warnings.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned_at = float("-inf")
        self._count = 0  # since the last warning

    def warn(self, message: str) -> None:
        """Counts one, and logs `message` unless it was logged a moment ago."""
        self._count += 1
        if (now := time.monotonic()) > self._warned_at + WARNING_EVERY:
            times = f" ({self._count} times since the last warning)" if self._count > 1 else ""
            self._logger.warning("%s%s", message, times)
            self._warned_at, self._count = now, 0

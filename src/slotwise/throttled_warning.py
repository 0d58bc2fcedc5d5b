"""A warning that clients can cause at will: written at most once a minute, with the number of times it was due."""

from __future__ import annotations

import logging
import time

EVERY = 60.0  # seconds between two warnings


class ThrottledWarning:
    """Counts what happens, and warns of it.  Args: logger: receives the warnings."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._warned_at = float("-inf")
        self._count = 0  # since the last warning

    def warn(self, message: str) -> None:
        """Counts one, and logs `message` unless it was logged a moment ago."""
        self._count += 1
        if (now := time.monotonic()) > self._warned_at + EVERY:
            times = f" ({self._count} times since the last warning)" if self._count > 1 else ""
            self._logger.warning("%s%s", message, times)
            self._warned_at, self._count = now, 0

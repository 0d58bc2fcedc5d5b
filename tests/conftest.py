"""What every test finds."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, here and in every process started here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

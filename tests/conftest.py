"""What every test finds."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])  # how fast a machine is proves nothing
settings.load_profile("busy")


def pytest_configure() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, here and in every process started here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

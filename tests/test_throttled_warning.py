"""A warning that a client can cause is written once, with a count later."""

from __future__ import annotations

import logging

import pytest

from slotwise import errors
from slotwise.errors import ThrottledWarning


def test_a_flood_is_one_warning_and_then_a_number(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    warning = ThrottledWarning(logging.getLogger("flood"))
    for _ in range(100):
        warning.warn("not HTTP")
    assert [record.message for record in caplog.records] == ["not HTTP"]
    monkeypatch.setattr(errors, "WARNING_EVERY", -1.0)
    warning.warn("not HTTP")
    assert caplog.records[-1].message == "not HTTP (100 times since the last warning)"

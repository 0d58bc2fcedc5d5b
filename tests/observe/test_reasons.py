"""Every reason a plan may give has a place in the metrics and words on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

import slotwise.observe.timeline as timeline
from slotwise.core import reasons
from slotwise.observe.metrics import STALLS, WAITS

EVERY = [value for name, value in vars(reasons).items() if name.isupper()]
QUEUE = Path(timeline.__file__).with_name("assets") / "queue.js"


@pytest.mark.parametrize("reason", EVERY)
def test_a_reason_is_counted_from_the_start_and_said_in_words(reason: str) -> None:
    assert reason in WAITS + STALLS or reason == reasons.OUTRANKED  # that one is why a slot was given up
    assert f"{reason}: \"" in QUEUE.read_text()

"""The arithmetic of a scenario: which request counts as lost, and which block as leaked."""

from __future__ import annotations

import pytest

from attacks import ledger, scenarios
from slotwise.measure.bench.measures import COMPLETED, REJECTED, UNFINISHED, RequestOutcome


@pytest.mark.parametrize(("status", "ends", "finish_reason", "failed", "expected"), [
    (200, 1, "length", False, "COMPLETED"), (200, 1, "abort", False, "ABORTED"), (200, 1, "", True, "FAILED"),
    (500, 1, "", True, "FAILED"), (504, 1, "", True, "FAILED"), (503, 1, "", True, "REFUSED"),
    (400, 1, "", True, "IMPOSSIBLE"),
    (200, 0, "", False, "LOST"),  # broke off
    (200, 2, "stop", True, "LOST"),  # ended, and then an error
    (0, 0, "", False, "LOST"),
])
def test_a_fate_needs_exactly_one_end(
    status: int, ends: int, finish_reason: str, failed: bool, expected: str,
) -> None:
    assert ledger.fate(status, ends, finish_reason, failed) == getattr(ledger, expected)


def test_sent_is_ended_and_lost() -> None:
    fates = ledger.tally([ledger.COMPLETED] * 5 + [ledger.LOST] * 2 + [ledger.HUNG_UP, ledger.UNHEARD])
    row = ledger.Row("name", fates, leaked=0, holds={"kept": True, "dropped": False}, seen=[])
    assert (row.sent, row.ended, row.lost) == (8, 6, 2)  # whom nobody heard was never sent
    assert row.broken == ["no request lost", "dropped"]


def test_leaks_break_a_row() -> None:
    assert ledger.leaked_blocks(1 / 1024, 1024, needed=1) == 0
    assert ledger.leaked_blocks(4 / 18, 18, needed=1) == 3
    assert ledger.Row("name", {}, leaked=3, holds={}, seen=[]).broken == ["no block leaked"]


def test_goodput_counts_the_steady_part_of_who_was_let_in() -> None:
    times = tuple(float(second) for second in range(10))
    outcomes = [
        RequestOutcome(0, COMPLETED, 0.0, 0.0, times, 9.0, 5, 20),  # two tokens an event
        RequestOutcome(1, UNFINISHED, 0.0, 0.0, times, 0.0, 5, 0),
        RequestOutcome(2, REJECTED, 0.0, 0.0, error="503: full")]
    assert scenarios.goodput(outcomes, 10.0) == pytest.approx(2 * 2 * 8 / 8.0)  # from second 2 on
    assert [scenarios.fate(outcome) for outcome in outcomes] == [ledger.COMPLETED, ledger.LOST, ledger.REFUSED]

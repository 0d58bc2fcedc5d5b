"""The arithmetic of the table: who counts as lost, which blocks as leaked, and where it is written."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.reliability.ledger")


@pytest.mark.parametrize(("status", "ends", "finish_reason", "failed", "expected"), [
    (200, 1, "length", False, "COMPLETED"), (200, 1, "abort", False, "ABORTED"), (200, 1, "", True, "FAILED"),
    (500, 1, "", True, "FAILED"), (504, 1, "", True, "FAILED"), (503, 1, "", True, "REFUSED"),
    (400, 1, "", True, "IMPOSSIBLE"),
    (200, 0, "", False, "LOST"),  # broke off
    (200, 2, "stop", True, "LOST"),  # ended, and then an error
    (0, 0, "", False, "LOST"),
])
def test_a_fate_needs_exactly_one_end(
    ledger: ModuleType, status: int, ends: int, finish_reason: str, failed: bool, expected: str,
) -> None:
    assert ledger.fate(status, ends, finish_reason, failed) == getattr(ledger, expected)


def test_sent_is_ended_and_lost(ledger: ModuleType) -> None:
    fates = ledger.tally([ledger.COMPLETED] * 5 + [ledger.LOST] * 2 + [ledger.HUNG_UP, ledger.UNHEARD])
    row = ledger.Row("name", fates, leaked=0, holds={"kept": True, "dropped": False}, seen=[])
    assert (row.sent, row.ended, row.lost) == (8, 6, 2)  # whom nobody heard was never sent
    assert row.broken == ["no request lost", "dropped"]


def test_leaks_break_a_row(ledger: ModuleType) -> None:
    assert ledger.leaked_blocks(1 / 1024, 1024, needed=1) == 0
    assert ledger.leaked_blocks(4 / 18, 18, needed=1) == 3
    assert ledger.Row("name", {}, leaked=3, holds={}, seen=[]).broken == ["no block leaked"]


def test_a_row_of_the_table(ledger: ModuleType) -> None:
    row = ledger.Row("kill", {ledger.FAILED: 1200, ledger.LOST: 1}, 0, {"back": True}, ["a|b", "c"]).as_json()
    text = ledger.table([row])
    assert text.splitlines()[-1] == (
        "| kill | 1,201 | 1,200 (1,200 error) | 1 | 0 | **no**: no request lost | a\\|b; c |")


def test_goodput_counts_the_steady_part_of_who_was_let_in(ledger: ModuleType) -> None:
    from slotwise.bench.measures import COMPLETED, REJECTED, UNFINISHED, RequestOutcome

    overload = importlib.import_module("benchmarks.reliability.overload")
    times = tuple(float(second) for second in range(10))
    outcomes = [
        RequestOutcome(0, COMPLETED, 0.0, 0.0, times, 9.0, 5, 20),  # two tokens an event
        RequestOutcome(1, UNFINISHED, 0.0, 0.0, times, 0.0, 5, 0),
        RequestOutcome(2, REJECTED, 0.0, 0.0, error="503: full")]
    assert overload.goodput(outcomes, 10.0) == pytest.approx(2 * 2 * 8 / 8.0)  # from second 2 on
    assert [overload.fate(outcome) for outcome in outcomes] == [ledger.COMPLETED, ledger.LOST, ledger.REFUSED]

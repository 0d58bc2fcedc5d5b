"""A decode run of which a simulated server has taken some steps."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.decode_run import DecodeRun
from slotwise.simulate.pace import Pace


class RunInProgress:
    """The steps of a run that a server has taken so far: its scheduler learns of them when the run is over.

    Args:
        rows: the tokens of each.
        beside: seconds of each step that its adapters take.
    """

    def __init__(self, run: DecodeRun, rows: Sequence[Sequence[int]], pace: Pace, beside: float) -> None:
        run.end_at_stops(rows)
        self.run = run
        self.rows = rows
        self.beside = beside
        self.seconds = pace.decode_steps(run.work(0))  # of each step to come
        self.planned: list[float] = []  # seconds, as the next
        self.ended: list[float] = []

    @property
    def left(self) -> int:
        """Steps to come."""
        return self.run.length - len(self.ended)

    def times(self, index: int) -> tuple[int, int]:
        """Returns when a step was planned, and when it ended, in nanoseconds."""
        return round(self.planned[index] * 1e9), round(self.ended[index] * 1e9)

"""The log of actions on a server, and of violated laws.

In a *window* a response may be an explicit error, because the engine or the API process was killed or stopped.
Outside of windows all laws hold.  Times are seconds of `time.perf_counter`, which all processes of a machine share;
printed ones are seconds since the run began.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tqdm import tqdm

SETTLE = 0.5  # seconds after a window's end in which its errors may still arrive
MAX_KEPT = 200  # violations stored one by one; more are only counted
MAX_SHOWN = 10  # violations printed for each law
LATEST = 12  # actions printed with a violation


@dataclass(slots=True)
class Window:
    """`ended` is infinite while it is open."""

    why: str
    began: float
    ended: float = float("inf")

    def overlaps(self, since: float, until: float) -> bool:
        return self.began <= until and since <= self.ended + SETTLE


@dataclass(slots=True)
class Violation:
    """`latest` are the actions before it."""

    at: float  # seconds since the run began
    law: str
    what: str
    latest: list[str]


@dataclass(slots=True)
class Journal:
    """The journal of one run: actions, windows and violations."""

    seed: int
    began: float = field(default_factory=time.perf_counter)
    actions: list[tuple[float, str]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # violations of each law
    notes: list[tuple[float, str, str]] = field(default_factory=list)  # what was seen and breaks no law

    def since(self, at: float) -> float:
        return round(at - self.began, 3)

    def did(self, what: str) -> None:
        """Records an action, with what a repetition of the run needs."""
        self.actions.append((self.since(time.perf_counter()), what))

    def noted(self, what: str, told: str, at: float) -> None:
        """Records what was seen at a time."""
        self.notes.append((self.since(at), what, told[:600]))

    def violated(self, law: str, what: str, at: float | None = None) -> None:
        """Records a violation of `law`, and prints it at once.

        Args:
            at: its time; None: now.
        """
        self.counts[law] = self.counts.get(law, 0) + 1
        if self.counts[law] > MAX_KEPT:
            return
        moment = self.since(time.perf_counter() if at is None else at)
        latest = [f"{when:.3f} {action}" for when, action in self.actions if when <= moment][-LATEST:]
        self.violations.append(Violation(moment, law, what[:600], latest))
        if self.counts[law] <= MAX_SHOWN:
            tqdm.write(f"    {moment:8.1f} s  seed {self.seed}  {law}: {what[:300]}")

    @contextlib.contextmanager
    def window(self, why: str) -> Iterator[Window]:
        """Opens a window for the block and shortly after it."""
        opened = Window(why, time.perf_counter())
        self.windows.append(opened)
        try:
            yield opened
        finally:
            opened.ended = time.perf_counter()

    def excused(self, since: float, until: float) -> bool:
        """Returns whether a window overlaps the time between two moments."""
        return any(window.overlaps(since, until) for window in self.windows)

    def excluded(self) -> float:
        """Returns the seconds within windows."""
        total, reached = 0.0, 0.0
        for window in sorted(self.windows, key=lambda one: one.began):
            start, end = max(window.began, reached), min(window.ended, time.perf_counter()) + SETTLE
            total += max(0.0, end - start)
            reached = max(reached, end)
        return total

    def as_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "violated": self.counts, "violations": [asdict(one) for one in self.violations],
                "windows": [[self.since(one.began), self.since(one.ended), one.why] for one in self.windows],
                "notes": self.notes, "actions": self.actions}

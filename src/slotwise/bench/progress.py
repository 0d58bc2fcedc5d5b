"""Progress of a long comparison, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]
"""Receives how much of a task's total is done."""


class Bar:
    """A line for each task; silent without a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._current: TaskID | None = None

    @contextlib.contextmanager
    def task(self, label: str, total: int | None = None) -> Iterator[Advance]:
        """One task; without a `total` its length is unknown."""
        task = self._current = self._progress.add_task(label, total=total)
        yield lambda done: self._progress.update(task, completed=done)
        self._progress.update(task, total=total or 1, completed=total or 1)

    def say(self, what: str) -> None:
        """Set the description of the current task."""
        if self._current is not None:
            self._progress.update(self._current, description=what)


@contextlib.contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar on stderr, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        yield Bar(progress)

"""A progress bar on stderr: of a download, of weights that are read and packed, of kernels that are compiled.

On a terminal it is one line that is gone at the end.  Elsewhere each download is one plain line as it begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MEGABYTE = 1_000_000


class _Stage(NamedTuple):
    """What is shown of a stage of loading."""

    words: str
    counted: str = ""  # what `done` and `total` count; "": bytes


STAGES = {"weights": _Stage("Reading and packing weights"),
          "calibration": _Stage("Calibrating int4 weights, once for a checkpoint", "positions"),
          "kernels": _Stage("Compiling kernels", "kernels")}


def to_stderr(line: str) -> None:
    """Prints a line."""
    print(line, file=sys.stderr, flush=True)


def discard(line: str) -> None:
    """Drops the line."""


class ProgressBar:
    """Shows how far a stage is: a download by its own words, or one of `STAGES`.

    Args:
        say: receives a line as each stage begins, where no bar is shown.
        is_wanted: False: no bar is shown on a terminal either.
    """

    def __init__(self, say: Callable[[str], None] = discard, *, is_wanted: bool = True) -> None:
        self._say, self._is_shown = say, is_wanted and sys.stderr.isatty()
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done; nothing where there is nothing to do."""
        if not total:
            return
        shown = STAGES.get(stage, _Stage(stage))
        sizes = (f"{done:,} of {total:,} {shown.counted}" if shown.counted
                 else f"{done / MEGABYTE:,.0f} of {total / MEGABYTE:,.0f} MB")
        if stage != self._stage:
            self._stage = stage
            if self._is_shown:
                self._begin(shown.words)
            else:
                self._say(f"{shown.words}, {sizes.rpartition(' of ')[2]}")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=total, completed=done, sizes=sizes)

    def _begin(self, words: str) -> None:
        # Imported here: a start that shows no bar is faster without it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False), BarColumn(),
                TextColumn("{task.fields[sizes]}", markup=False), TimeRemainingColumn(compact=True),
                console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.console.show_cursor()  # it is hidden now, and would stay so where an interrupt ends the process
        elif self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(words, total=None, sizes="")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bar, for good: an engine that is replaced later loads without one."""
        self._is_shown, self._say = False, discard
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

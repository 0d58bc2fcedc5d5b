"""A progress bar with sizes on stderr: of a download, of weights that are read, of kernels that are compiled.

On a terminal it is one line that is gone at the end.  Elsewhere each stage is one plain line as it begins, if at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MEGABYTE = 1_000_000


def to_stderr(line: str) -> None:
    """Prints a line."""
    print(line, file=sys.stderr, flush=True)


class ProgressBar:
    """Shows the bytes of each stage.

    Args:
        say: receives a line for each stage where there is no terminal.
        is_text: stderr is for people; False: each line is JSON, and there is no bar.
    """

    def __init__(self, say: Callable[[str], None] = to_stderr, *, is_text: bool = True) -> None:
        self._say, self._is_shown = say, is_text and sys.stderr.isatty()
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of a stage are done."""
        if stage != self._stage:
            self._stage = stage
            if not self._is_shown:
                self._say(f"{stage}, {total / MEGABYTE:,.0f} MB")
            else:
                self._begin(stage, total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def _begin(self, stage: str, total: int) -> None:
        # Imported here: a start that shows no bar is faster without it.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        if self._bar is None:
            self._bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(),
                                 TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
                                 transient=True)
            self._bar.start()
        elif self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=total)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._task, self._stage = None, None, ""

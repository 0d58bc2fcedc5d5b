"""A progress bar on stderr while something long runs, gone at its end; without a terminal, a line for each part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm


class ProgressBar:
    """Counts up to a total; what counts from zero again, as a second run does, is added."""

    def __init__(self, bar: tqdm[Any], label: str) -> None:
        self._bar = bar
        self._label = label
        self._last = 0

    def show(self, done: int) -> None:
        self._bar.update(max(0, done - self._last))
        self._last = done

    def count(self, _: object = None) -> None:
        """One more is done."""
        self._bar.update()

    def say(self, what: str) -> None:
        """Name the part that begins."""
        if self._bar.disable:
            print(f"{self._label}: {what}", file=sys.stderr)
        self._bar.set_description(what)


@contextlib.contextmanager
def progress(label: str = "", total: int | None = None, unit: str = "it") -> Iterator[ProgressBar]:
    """Args: total: in `unit`s; None: unknown."""
    with tqdm(desc=label, total=total, unit=unit, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield ProgressBar(bar, label)

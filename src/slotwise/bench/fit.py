"""Step time as a straight line: seconds = a + b x, with x the rows of a decode step, or the tokens of one with prompts.

`a` is what a step costs for any number of rows (weights read once, launches, Python): what batching shares out.  `b` is
what each row adds.  At a/b rows the two are equal, and further rows no longer come nearly free.

The line is the least-squares fit through the median of all steps with the same x, each median weighted by the number of
such steps: a step that some other process delayed does not bend it.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class Fitted(NamedTuple):
    """seconds = a + b x"""

    a: float
    b: float

    def total(self, steps: Steps) -> float:
        """Seconds predicted for all of `steps` together."""
        return sum(len(seconds) * (self.a + self.b * x) for x, seconds in steps.by_x.items())


class Steps:
    """Seconds of steps, by x: eight bytes per step."""

    def __init__(self) -> None:
        self.by_x: dict[int, array[float]] = {}

    def add(self, x: int, seconds: float) -> None:
        self.by_x.setdefault(x, array("d")).append(seconds)

    def __iter__(self) -> Iterator[float]:
        for seconds in self.by_x.values():
            yield from seconds

    @property
    def total(self) -> float:
        """Seconds, summed."""
        return sum(sum(seconds) for seconds in self.by_x.values())

    def fitted(self) -> Fitted:
        """The line through the medians; flat where all steps share one x, and zero where there are none."""
        xs = list(self.by_x)
        medians = [statistics.median(seconds) for seconds in self.by_x.values()]
        counts = [len(seconds) for seconds in self.by_x.values()]
        if len(xs) < 2:
            return Fitted(sum(medians), 0.0)
        b, a = np.polyfit(xs, medians, 1, w=np.sqrt(counts))
        return Fitted(float(a), float(b))


def together(several: Iterable[Steps]) -> Steps:
    """The steps of several runs as one."""
    whole = Steps()
    for steps in several:
        for x, seconds in steps.by_x.items():
            whole.by_x.setdefault(x, array("d")).extend(seconds)
    return whole

"""Step time as a straight line: seconds = a + b x, with x the rows of a decode step, or the tokens of one with prompts.

`a` is what a step costs however few take part (weights read once, launches, Python): what batching shares out.  `b` is
what each row adds.  At a/b rows the two are level, and further rows no longer come nearly free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Fitted(NamedTuple):
    """seconds = a + b x"""

    a: float
    b: float

    def total(self, line: Line) -> float:
        """Seconds predicted for all the steps of `line` together."""
        return self.a * line.count + self.b * line.sum_x


class Line:
    """Least squares from running sums: any number of points in five numbers."""

    __slots__ = ("count", "sum_x", "sum_xx", "sum_xy", "sum_y")

    def __init__(self) -> None:
        self.count = 0
        self.sum_x = self.sum_y = self.sum_xx = self.sum_xy = 0.0

    def add(self, x: float, y: float) -> None:
        self.count += 1
        self.sum_x += x
        self.sum_y += y
        self.sum_xx += x * x
        self.sum_xy += x * y

    def fitted(self) -> Fitted:
        """The line of least squares; flat where all points share one x, and zero where there are none."""
        if not self.count:
            return Fitted(0.0, 0.0)
        spread = self.count * self.sum_xx - self.sum_x**2
        if spread <= 1e-9 * self.count * self.sum_xx:
            return Fitted(self.sum_y / self.count, 0.0)
        b = (self.count * self.sum_xy - self.sum_x * self.sum_y) / spread
        return Fitted((self.sum_y - b * self.sum_x) / self.count, b)


def together(lines: Iterable[Line]) -> Line:
    """All points of `lines` as one."""
    whole = Line()
    for line in lines:
        for name in Line.__slots__:
            setattr(whole, name, getattr(whole, name) + getattr(line, name))
    return whole

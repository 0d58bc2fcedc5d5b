"""Ranges of numbers, and numbers with units: one check for sampling parameters, settings and the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

SMALLEST = 1e-9  # of a real setting that is not 0: smaller ones are mistakes, and overflow where they divide
LARGEST = 1 << 31
INT64 = 2**63 - 1
MOST_DIGITS = 64
UNITS = {  # vLLM's
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BYTE_UNITS = UNITS | {
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float
    is_whole: bool = True
    may_be_infinite: bool = False
    may_be_none: bool = False
    smallest: float = 0.0  # magnitude of a number that is not 0

    @property
    def kind(self) -> type[int] | type[float]:
        return int if self.is_whole else float

    def objection(self, value: Any) -> str:
        """What is wrong with `value`; "" if nothing is."""
        if value is None and self.may_be_none:
            return ""
        kind: type[Any] = Integral if self.is_whole else Real
        if not isinstance(value, bool) and isinstance(value, kind) and self._holds(value):
            return ""
        return f"must be {self}, not {value!r:.40}"

    def checked(self, value: Any) -> int | float | None:
        """Returns `value` as an `int`, a `float` or None.  Raises ValueError, with the objection."""
        if wrong := self.objection(value):
            raise ValueError(wrong)
        return None if value is None else self.kind(value)

    def _holds(self, value: Any) -> bool:
        if self.may_be_infinite and value == math.inf:
            return True
        within = self.least <= value <= self.most  # false for NaN
        return bool(within and (value == 0 or abs(value) >= self.smallest))

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} from {_written(self.least)} to {_written(self.most)}" + (" or inf" * self.may_be_infinite)


def _written(number: float) -> str:
    if isinstance(number, int):
        return "2^63 - 1" if number == INT64 else str(number)
    return f"{number:.15g}"


def whole(least: int, most: int = LARGEST) -> Range:
    return Range(least, most)


def real(least: float, most: float) -> Range:
    return Range(least, most, is_whole=False, smallest=SMALLEST)


def with_unit(text: str, units: Mapping[str, int]) -> Fraction | None:
    """Returns the number that a text such as 4k says; None for one without a unit of `units`."""
    found = _WITH_UNIT.fullmatch(text) if len(text) <= MOST_DIGITS else None
    return Fraction(found[1]) * units[found[2]] if found is not None and found[2] in units else None

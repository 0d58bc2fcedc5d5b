"""Numbers of the command line: each option has a range, and values outside it are refused in one line."""

from __future__ import annotations

import argparse
import math

from slotwise.core.settings import BYTE_UNITS, MOST_DIGITS, UNITS, Range, with_unit

GIB = 2**30  # bytes


class Number:
    """An argparse type: a number in ASCII digits, within a range."""

    hint = ""  # further ways to write it, behind the range

    def __init__(self, range_: Range, words: dict[str, float] | None = None) -> None:
        """Args: words: texts that stand for numbers, in the range or not."""
        self.range = range_
        self.words = words or {}

    def __call__(self, text: str) -> float:
        if text in self.words:
            return self.words[text]
        number = self._number(text)
        if self.range.objection(number):
            either = "".join(f"{word} or " for word in self.words)
            raise argparse.ArgumentTypeError(f"must be {either}{self.range}{self.hint}, not {text!r:.40}")
        return number

    def _number(self, text: str) -> float:
        """Returns the number that `text` says; NaN, which is in no range, for none."""
        try:
            if not text.isascii() or "_" in text or text != text.strip() or len(text) > MOST_DIGITS:
                raise ValueError
            return int(text) if self.range.is_whole else float(text)
        except ValueError:
            return math.nan


class Size(Number):
    """A number of tokens, also with one of vLLM's units: 4k is 4,000, 4K is 4,096."""

    hint = ", also as 4k or 4K"
    units = UNITS
    one = 1  # what a number without a unit counts

    def _number(self, text: str) -> float:
        counted = with_unit(text, self.units)
        if counted is None:
            return super()._number(text)
        number = counted / self.one
        if not self.range.is_whole:
            return float(number)
        return int(number) if number.denominator == 1 else math.nan


class Bytes(Size):
    """A number of bytes, also as 8GiB (binary) or 8GB (decimal)."""

    hint = ", also as 512MiB or 8GB"
    units = BYTE_UNITS


class Gibibytes(Bytes):
    """A number of GiB; with a unit, of bytes."""

    one = GIB

"""Numbers of the command line: each option has a range, and values outside it are refused in one line."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

from slotwise.core.ranges import Range
from slotwise.errors import one_line

MOST_DIGITS = 64


class Number:
    """An argparse type: a number in ASCII digits, within a range."""

    def __init__(self, range_: Range, words: dict[str, float] | None = None) -> None:
        """Args: words: texts that stand for numbers, in the range or not."""
        self.range = range_
        self.words = words or {}

    def __call__(self, text: str) -> float:
        if text in self.words:
            return self.words[text]
        try:
            if not text.isascii() or "_" in text or text != text.strip() or len(text) > MOST_DIGITS:
                raise ValueError
            number: float = int(text) if self.range.is_whole else float(text)
        except ValueError:
            number = math.nan  # in no range
        if self.range.objection(number):
            either = "".join(f"{word} or " for word in self.words)
            raise argparse.ArgumentTypeError(f"must be {either}{self.range}, not {text!r:.40}")
        return number


class Parser(argparse.ArgumentParser):
    """Reports an error in a command in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {one_line(message)} ({self.prog} --help tells what there is)", file=sys.stderr)
        sys.exit(2)

"""Reads a text that arrives in parts.

Methods that may need text which has not come yet are generators: they yield while they wait, and return what they read.
A parser written with them reads like one of a whole text, and finds the same wherever the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
SPACES = re.compile(r"[ \t\r\n]+")


@lru_cache(64)
def _any_of(spellings: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.has_ended = False  # no more text comes

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def keep(self) -> None:
        """Keeps what is read from here on, for `pop_kept`."""
        self._kept = []

    def pop_kept(self) -> str:
        """Returns what was read since `keep`."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def take(self, length: int) -> str:
        """Reads so many characters of those that are there."""
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def _left(self) -> int:
        return len(self._text) - self._at

    def peek(self) -> Waiting[str]:
        """The next character; "" at the end."""
        while not self._left() and not self.has_ended:
            yield
        return self._text[self._at : self._at + 1]

    def ahead(self, length: int) -> Waiting[str]:
        """The next characters, unread: so many, or all that are left at the end."""
        while self._left() < length and not self.has_ended:
            yield
        return self._text[self._at : self._at + length]

    def at(self, *spellings: str) -> Waiting[str]:
        """The one of `spellings` that comes next, the longest of them; "" if none does."""
        while True:
            left = self._text[self._at : self._at + max(map(len, spellings))]
            if self.has_ended or not any(len(left) < len(one) and one.startswith(left) for one in spellings):
                return max((one for one in spellings if left.startswith(one)), key=len, default="")
            yield

    def skip(self, spelling: str) -> Waiting[bool]:
        """Reads `spelling` if it comes next."""
        if (yield from self.at(spelling)) != spelling:
            return False
        self.take(len(spelling))
        return True

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches next, of what is there: for patterns of which any beginning matches, too."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def all_of(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Reads all that matches: for patterns of which any beginning matches, too."""
        parts: list[str] = []
        while (yield from self.peek()) and (run := self.run(pattern)):
            parts.append(run)
        return "".join(parts)

    def spaces(self) -> Waiting[None]:
        """Reads white space."""
        yield from self.all_of(SPACES)

    def until(self, emit: Callable[[str], object], *spellings: str) -> Waiting[str]:
        """Gives the text before the first of `spellings` to `emit` as it comes, and reads it; returns which it is.

        Returns "" at the end of the text.
        """
        found = _any_of(spellings)
        while True:
            if match := found.search(self._text, self._at):
                spelling = match.group()
                if safe := match.start() - self._at:
                    emit(self.take(safe))
                if (yield from self.at(*spellings)) == spelling:  # else a longer one may come
                    self.take(len(spelling))
                    return spelling
                continue
            safe = self._left() - (0 if self.has_ended else self._begun(spellings))
            if safe:
                emit(self.take(safe))
            if self.has_ended:
                return ""
            yield

    def rest(self, emit: Callable[[str], object]) -> Waiting[None]:
        """Gives all that is left to `emit` as it comes."""
        while (yield from self.peek()):
            emit(self.take(self._left()))

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        if self._kept is not None:
            self._kept = ["".join(self._kept).removesuffix(text)]
        self._text = text + self._text[self._at :]
        self._at = 0

    def _begun(self, spellings: tuple[str, ...]) -> int:
        """Characters at the end of the text that begin one of `spellings`."""
        for length in range(min(self._left(), max(map(len, spellings)) - 1), 0, -1):
            if any(one.startswith(self._text[-length:]) for one in spellings):
                return length
        return 0

"""Stop strings: they end a text, are not part of it, and may begin in one token and end in another.

All stop strings are searched together, by comparisons of whole strings.  A stop string can be complete only after its
last character, so the strings are grouped by that.  The text held back is the longest end of the text that begins a
stop string: its start only moves forwards, and one binary search in the sorted stop strings tests one start.  A
character therefore costs a constant number of searches on average, however many stop strings there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Checked(NamedTuple):
    """`text` may be returned; the rest could still be the beginning of a stop string.  `stop` is the one found."""

    text: str
    stop: str | None


class _Compiled:
    """Several stop strings, arranged for searching."""

    __slots__ = ("by_last", "firsts", "longest", "ordered")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.ordered = sorted(set(stops))
        self.firsts = frozenset(stop[0] for stop in stops)
        self.longest = max(map(len, stops), default=0)
        by_last: dict[str, list[str]] = {}
        for stop in self.ordered:
            by_last.setdefault(stop[-1], []).append(stop)
        self.by_last = {last: tuple(ending) for last, ending in by_last.items()}

    def complete(self, text: str, checked: int) -> tuple[int, str] | None:
        """The first end after `checked` characters at which a stop string is complete, and the longest of those."""
        for end, character in enumerate(text[checked:], checked + 1):
            stops = self.by_last.get(character)
            if stops is not None and text.endswith(stops, 0, end):
                return end, max((stop for stop in stops if text.endswith(stop, 0, end)), key=len)
        return None

    def safe(self, text: str) -> int:
        """How many characters no stop string can begin in.  In `text` none is complete."""
        for start in range(max(0, len(text) - self.longest + 1), len(text)):
            if text[start] in self.firsts:
                end = text[start:]
                place = bisect_left(self.ordered, end)
                if place < len(self.ordered) and self.ordered[place].startswith(end):
                    return start
        return len(text)


_compiled = lru_cache(maxsize=16)(_Compiled)  # the choices of one request share one


class StopStrings:
    """Finds stop strings in a text that is fed in parts.

    The text ends before the stop string that is complete first; of those complete at the same character, before the
    longest.  How the text is divided makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = _compiled(tuple(stops))
        self._held = ""

    def feed(self, text: str) -> Checked:
        """The part of the text that may be returned now."""
        stops, held = self._stops, self._held
        if not held and stops.firsts.isdisjoint(text):
            return Checked(text, None)
        whole = held + text
        found = stops.complete(whole, len(held))
        if found is not None:
            end, stop = found
            self._held = ""
            return Checked(whole[: end - len(stop)], stop)
        safe = stops.safe(whole)
        self._held = whole[safe:]
        return Checked(whole[:safe], None)

    def flush(self) -> str:
        """The text held back, when no stop string ended it."""
        held, self._held = self._held, ""
        return held

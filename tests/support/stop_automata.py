"""Stop strings found by one automaton each: slow, and the reference for `StopStrings`."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.text.stop_strings import StopSearch


class Automaton:
    """Knuth, Morris and Pratt's: the longest beginning of one stop string that the text so far ends with."""

    __slots__ = ("_failures", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._failures = [0, 0]  # of the first k characters, the longest proper prefix that is also a suffix

    def step(self, character: str) -> bool:
        """Whether the stop string is complete with `character`."""
        matched, stop = self.matched, self.stop
        while matched and stop[matched] != character:
            matched = self._failures[matched]
        self.matched = matched = matched + (stop[matched] == character)
        if matched == len(self._failures):
            self._extend()
        return matched == len(stop)

    def _extend(self) -> None:
        end = len(self._failures) - 1
        shorter = self._failures[end]
        while shorter and self.stop[shorter] != self.stop[end]:
            shorter = self._failures[shorter]
        self._failures.append(shorter + (self.stop[shorter] == self.stop[end]))


class Automata:
    """An independent implementation with the interface of `StopStrings`, one automaton for each stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [Automaton(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> StopSearch:
        """The part of the text that may be returned now."""
        if not self._held and not any(matcher.stop[0] in text for matcher in self._matchers):
            return StopSearch(text, None)
        before = len(self._held)
        whole = self._held + text
        for i, character in enumerate(text, before + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return StopSearch(whole[: i - len(stop)], stop)
        safe = len(whole) - max(matcher.matched for matcher in self._matchers)
        self._held = whole[safe:]
        return StopSearch(whole[:safe], None)

    def flush(self) -> str:
        """The text held back, when no stop string ended it."""
        held, self._held = self._held, ""
        return held

"""Prompt lookup: the tokens that followed the last ones when they occurred before in the same request.

    known   ... def area ( self ) : return ... def area ( self ) :
                ▲ match               ▲ guess  └ the last tokens ┘

After "prompt lookup decoding" (Saxena, 2023), as vLLM's method `ngram`: the last `longest` tokens are searched, then
fewer of them, down to `shortest`.  While a guess holds, its text is followed and nothing is searched.
"""

from __future__ import annotations

from slotwise.speculation.follow import Follower
from slotwise.speculation.guess import MAX_MATCH, Guess
from slotwise.speculation.ids import NOT_FOUND, TokenText

WINDOW = 1 << 14  # tokens that are searched, the latest ones: at most 20 µs


class NgramLookup:
    """Looks up the last tokens of one request, `longest` to `shortest` of them, in all of its tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._follower = Follower()

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`, a text that only grows."""
        follower = self._follower
        follower.advance(known)
        if not follower.agrees and (place := self._search(known)) != NOT_FOUND:
            end = len(known)
            follower.start(known, place, end, max(1, known.common(place, known, end, MAX_MATCH)))
        return follower.guess(known, most)

    def _search(self, known: TokenText) -> int:
        """Returns the position behind the latest earlier occurrence of the last tokens, or NOT_FOUND."""
        end, begin = len(known), max(0, len(known) - WINDOW)
        if end <= self._shortest:
            return NOT_FOUND
        at = known.rfind(known.ids[end - self._shortest :], begin, end - 1)  # it decides whether longer ones may match
        if at == NOT_FOUND:
            return NOT_FOUND
        for length in range(min(self._longest, end - 1), self._shortest, -1):
            found = known.rfind(known.ids[end - length :], begin, end - 1)
            if found != NOT_FOUND:
                return found + length
        return at + self._shortest

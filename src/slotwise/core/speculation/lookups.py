"""Lookups of one request's own texts: earlier tokens of the request, the prediction of its client, a grammar's tokens.

**Prompt lookup** (Saxena, 2023; vLLM's method `ngram`): the tokens that followed the last ones when they occurred
before in the same request.

    known   ... def area ( self ) : return ... def area ( self ) :
                ▲ match               ▲ guess  └ the last tokens ┘

The last `longest` tokens are searched, then fewer of them, down to `shortest`.

**Predicted outputs**: the client says what it expects, as OpenAI's field `prediction`, and that text is the draft.
Useful where a file is returned with few changes.

**Forced tokens**: what a request's grammar forces, such as the keys of a JSON object, as the tokenizer writes them.
The executor returns them with the tokens that it sampled.  They are drafts like any others, because the grammar forces
the text and not the tokens: the model may write it in others.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.request import Request
from slotwise.core.speculation.token_text import MAX_MATCH, NO_GUESS, NOT_FOUND, Guess, TextFollower, TokenText

WINDOW = 1 << 14  # tokens that are searched, the latest ones: at most 20 µs


class NgramLookup:
    """Looks up the last tokens of one request, `longest` to `shortest` of them, in all of its tokens."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._follower = TextFollower()

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`, a text that only grows."""
        follower = self._follower
        follower.advance(known)
        if not follower.agrees and (place := self._search(known)) != NOT_FOUND:
            end = len(known)
            follower.start(known, place, end, max(1, known.common(place, known, end, MAX_MATCH)))
        return follower.guess(known, most)

    def _search(self, known: TokenText) -> int:
        """Returns the position after the latest earlier occurrence of the last tokens, or NOT_FOUND."""
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


SHORTEST = 3  # known tokens that are searched in all of a text that was lost


class PredictionLookup:
    """Follows the prediction of one request from its first output token on."""

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        self._text = TokenText(prediction)
        self._follower = TextFollower(self._text, num_prompt)

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`, a text that only grows."""
        follower, text = self._follower, self._text
        follower.advance(known)
        if follower.is_lost and len(known) >= SHORTEST:
            at = text.rfind(known.ids[-SHORTEST:], 0, len(text))
            if at != NOT_FOUND:
                place = at + SHORTEST
                follower.start(text, place, len(known), text.common(place, known, len(known), MAX_MATCH))
        return follower.guess(known, most)


class ForcedTokens:
    """What must follow the last tokens of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that must follow `known`."""
        at, tokens = self._request.forced
        return Guess(tokens[:most], 1) if tokens and at == len(known) else NO_GUESS

"""Tokens that a request's grammar forces, such as the keys of a JSON object, as the tokenizer writes them.

The executor tells them with the tokens that it sampled.  They are drafts as any others, because the grammar forces the
text and not the tokens: the model may write it in others.
"""

from __future__ import annotations

from slotwise.core.request import Request
from slotwise.speculation.guess import NO_GUESS, Guess
from slotwise.speculation.ids import TokenText


class ForcedTokens:
    """What must follow the last tokens of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that must follow `known`."""
        at, tokens = self._request.forced
        return Guess(tokens[:most], 1) if tokens and at == len(known) else NO_GUESS

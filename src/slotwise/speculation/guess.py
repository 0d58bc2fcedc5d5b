"""What a source of drafts says about a request's next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from slotwise.speculation.ids import TokenText

MAX_MATCH = 64  # tokens of a match that are counted: a longer one is no better


class Guess(NamedTuple):
    """Tokens that may come next, and how many tokens before them agree with the text that they are taken from."""

    tokens: Sequence[int]
    match: int  # 0: none, as behind a token that replaced one of the text


NO_GUESS = Guess((), 0)


class Source(Protocol):
    """A text or an index that knows how known tokens may go on; one for each request, or shared."""

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`; called with a text that only grows."""
        ...

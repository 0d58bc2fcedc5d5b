"""Predicted outputs: the client says what it expects, as OpenAI's field `prediction`, and the text is the draft.

Useful where a file is returned with few changes.  Behind a change the text is followed again (`follow.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.speculation.follow import Follower
from slotwise.speculation.guess import MAX_MATCH, Guess
from slotwise.speculation.ids import NOT_FOUND, TokenText

SHORTEST = 3  # known tokens that are searched in all of a text that was lost


class PredictionLookup:
    """Follows the prediction of one request from its first output token on."""

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        self._text = TokenText(prediction)
        self._follower = Follower(self._text, num_prompt)

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

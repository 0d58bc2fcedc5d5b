"""Following a text: while known tokens agree with it, its next tokens are the guess, and nothing is searched.

    text    ... x = 1 ; y = 2 ; return x
    known   ... x = 7 ; y
                    ▲   └ the guess goes on behind the replaced token: match 0, then 1, 2 ...
                    └ diverged

Behind a divergence the text goes on as if one token was replaced.  If that does not hold, the last two known tokens are
searched around the divergence, then the last one nearby: tokens were inserted or left out.
"""

from __future__ import annotations

from slotwise.speculation.guess import MAX_MATCH, NO_GUESS, Guess
from slotwise.speculation.ids import NOT_FOUND, TokenText

FAR = 512  # tokens behind a divergence in which two known ones are searched
NEAR = 16  # likewise one
BACK = 4  # tokens before it, in both cases: known tokens were inserted
MAX_UNSEEN = 64  # known tokens that may be new since the last call; with more, the text is lost
MAX_LOST = 128  # tokens since a divergence after which the text is lost


class Follower:
    """A place in a text, kept beside a growing sequence of known tokens.

    Args:
        num_known: known tokens when the text begins to be followed, at its first token.
    """

    def __init__(self, text: TokenText | None = None, num_known: int = 0) -> None:
        self._text = text  # None: lost
        self._place = 0  # in the text, of the token that is expected next
        self._length = num_known  # known tokens when that was so
        self._match = 0
        self._diverged_at = 0  # place of the last divergence
        self._num_since = 0  # known tokens since it; 0: none

    @property
    def is_lost(self) -> bool:
        return self._text is None

    @property
    def agrees(self) -> bool:
        """Whether the last known token is the one that the text had there."""
        return self._text is not None and self._match > 0

    def start(self, text: TokenText, place: int, num_known: int, match: int) -> None:
        """Follow `text` from `place` on, before which `match` tokens agree with the last of `num_known`."""
        self._text, self._place, self._length, self._match = text, place, num_known, match
        self._num_since = 0

    def advance(self, known: TokenText) -> None:
        """Take note of new known tokens."""
        text = self._text
        if text is None or len(known) == self._length:
            return
        if len(known) - self._length > MAX_UNSEEN:
            self._text = None
            return
        ids, ours = text.ids, known.ids
        for at in range(self._length, len(known)):
            agrees = self._place < len(ids) and ids[self._place] == ours[at]
            if agrees:
                self._match = min(MAX_MATCH, self._match + 1)
            elif self._match or not self._num_since:
                self._diverged_at, self._num_since, self._match = self._place, 0, 0
            if self._num_since or not agrees:
                self._num_since += 1
            self._place += 1
            if not agrees and self._num_since > 1:
                self._search(text, known, at + 1)
        self._length = len(known)
        if self._match >= 2 * BACK:
            self._num_since = 0
        elif self._num_since > MAX_LOST:
            self._text = None

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns the tokens that the text goes on with; a text that is `known` itself repeats its end."""
        text = self._text
        if text is None or self._place >= len(text):
            return NO_GUESS
        tokens = text.ids[self._place : self._place + most]
        if text is known and len(tokens) < most:
            period = len(known) - self._place
            tokens = (tokens * (most // period + 1))[:most]
        return Guess(tokens, self._match)

    def _search(self, text: TokenText, known: TokenText, end: int) -> None:
        """Find the last known tokens near the divergence."""
        begin, size = max(0, self._diverged_at - BACK), len(text)
        for length, reach in ((2, FAR), (1, NEAR)):
            at = text.find(known.ids[end - length : end], begin, min(size, self._diverged_at + reach))
            if at != NOT_FOUND and not (text is known and at + length >= end):
                self._place, self._match = at + length, length
                return

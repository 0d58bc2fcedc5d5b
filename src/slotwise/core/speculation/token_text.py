"""Texts of token ids, and how drafts are taken from them: by following a text while known tokens agree with it.

    text    ... x = 1 ; y = 2 ; return x
    known   ... x = 7 ; y
                    ▲   └ the guess goes on after the replaced token: match 0, then 1, 2 ...
                    └ diverged

While a text is followed, nothing is searched.  Behind a divergence the text goes on as if one token was replaced.  If
that does not hold, the last two known tokens are searched around the divergence, then the last one nearby: tokens were
inserted or left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

WIDTH = array("I").itemsize  # bytes of a token
MAX_UNALIGNED = 16  # finds of a search that begin inside a token, after which it gives up
NOT_FOUND = -1


class TokenText:
    """Token ids that only grow, also as bytes, which `bytes.rfind` searches: about 10 µs for 8,000 tokens."""

    __slots__ = ("_bytes", "ids")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("I", ids)
        self._bytes = bytearray(self.ids.tobytes())

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Sequence[int]) -> None:
        added = array("I", ids)
        self.ids.extend(added)
        self._bytes += added.tobytes()

    def rfind(self, pattern: Sequence[int], begin: int, end: int) -> int:
        """Returns the last position of `pattern` within `[begin, end)`, or NOT_FOUND."""
        wanted, low, high = array("I", pattern).tobytes(), begin * WIDTH, end * WIDTH
        for _ in range(MAX_UNALIGNED):
            at = self._bytes.rfind(wanted, low, high)
            if at < 0 or at % WIDTH == 0:
                return at // WIDTH if at >= 0 else NOT_FOUND
            high = at + len(wanted) - 1
        return NOT_FOUND

    def find(self, pattern: Sequence[int], begin: int, end: int) -> int:
        """Returns the first position of `pattern` within `[begin, end)`, or NOT_FOUND."""
        wanted, low, high = array("I", pattern).tobytes(), begin * WIDTH, end * WIDTH
        for _ in range(MAX_UNALIGNED):
            at = self._bytes.find(wanted, low, high)
            if at < 0 or at % WIDTH == 0:
                return at // WIDTH if at >= 0 else NOT_FOUND
            low = at + 1
        return NOT_FOUND

    def common(self, end: int, other: TokenText, other_end: int, most: int) -> int:
        """Returns how many tokens before `end` equal those before `other_end` of `other`, up to `most`."""
        most, count = min(most, end, other_end), 0
        ours, theirs = self.ids, other.ids
        while count < most and ours[end - 1 - count] == theirs[other_end - 1 - count]:
            count += 1
        return count


MAX_MATCH = 64  # tokens of a match that are counted: a longer one is no better


class Guess(NamedTuple):
    """Tokens that may come next, and how many tokens before them agree with the text that they are taken from."""

    tokens: Sequence[int]
    match: int  # 0: none, as after a token that replaced one of the text


NO_GUESS = Guess((), 0)


class DraftSource(Protocol):
    """A text or an index that knows how known tokens may go on; one for each request, or shared."""

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`; called with a text that only grows."""
        ...


FAR = 512  # tokens after a divergence in which two known ones are searched
NEAR = 16  # tokens after a divergence in which the last known one is searched
BACK = 4  # tokens before it, in both cases: known tokens were inserted
MAX_UNSEEN = 64  # known tokens that may be new since the last call; with more, the text is lost
MAX_LOST = 128  # tokens since a divergence after which the text is lost


class TextFollower:
    """A place in a text, kept next to a growing sequence of known tokens.

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

"""A suffix index over recent outputs: what followed the last tokens of a request in earlier outputs of its tenant.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975).  Its suffix tree is replaced by chains of equal ORDER-grams, as
LZ77 compressors have them: the last tokens lead to their latest occurrences, of which the longest match is followed,
and among equally long ones the continuation that most of them have.

    text      ... a b c x ... | ... a b c y ... | ... a b c x ...      outputs, one after another
    chain            └─────────────────┘─────────────────┘             by the tokens a b c

Memory is bounded: a salt keeps two generations of GENERATION tokens, of which the older is dropped when the newer is
full, and all salts together MAX_TOKENS; the salt used least recently goes first.  Outputs are found only under their
own salt, as cached prefixes are.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from slotwise.speculation.follow import Follower
from slotwise.speculation.guess import MAX_MATCH, Guess
from slotwise.speculation.ids import TokenText

ORDER = 3  # tokens that must match
CANDIDATES = 8  # latest occurrences that are compared
GENERATION = 1 << 15  # tokens; about 3.5 MB
MAX_TOKENS = 1 << 18  # of all salts
MAX_WAITING = 1 << 15  # tokens of outputs not yet in the index
END = (1 << 32) - 1  # no token: follows each output in the text


class Generation:
    """Outputs one after another, and for each position the one before that ends with the same ORDER tokens."""

    __slots__ = ("_before", "_last", "text")

    def __init__(self) -> None:
        self.text = TokenText()
        self._last: dict[tuple[int, ...], int] = {}  # by ORDER tokens: the position behind their last occurrence
        self._before = array("i", [0])  # by position; 0: none

    def extend(self, tokens: Sequence[int]) -> None:
        text, last, before = self.text, self._last, self._before
        begin = len(text)
        text.extend(tokens)
        ids = text.ids
        for place in range(begin + 1, len(ids) + 1):
            if place < ORDER:
                before.append(0)
                continue
            key = tuple(ids[place - ORDER : place])
            before.append(last.get(key, 0))
            last[key] = place

    def places(self, key: tuple[int, ...]) -> list[int]:
        """Returns the positions behind the latest occurrences of ORDER tokens."""
        found: list[int] = []
        place = self._last.get(key, 0)
        while place and len(found) < CANDIDATES:
            found.append(place)
            place = self._before[place]
        return found


class SuffixIndex:
    """Recent outputs by salt."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, list[Generation]] = OrderedDict()  # the newer generation last
        self._num_tokens = 0
        self._waiting: deque[tuple[str, Sequence[int]]] = deque()
        self._num_waiting = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Add an output; `work` puts it into the index."""
        self._waiting.append((salt, [*output, END]))
        self._num_waiting += len(output) + 1
        while self._num_waiting > MAX_WAITING:
            self._num_waiting -= len(self._waiting.popleft()[1])

    def work(self, num_tokens: int) -> None:
        """Index up to `num_tokens` tokens of the outputs that wait."""
        while self._waiting and num_tokens > 0:
            salt, tokens = self._waiting.popleft()
            if len(tokens) > num_tokens:
                self._waiting.appendleft((salt, tokens[num_tokens:]))
                tokens = tokens[:num_tokens]
            num_tokens -= len(tokens)
            self._num_waiting -= len(tokens)
            self._extend(salt, tokens)

    def _extend(self, salt: str, tokens: Sequence[int]) -> None:
        generations = self._salts.setdefault(salt, [Generation()])
        self._salts.move_to_end(salt)
        if len(generations[-1].text) + len(tokens) > GENERATION:
            generations.append(Generation())
            if len(generations) > 2:
                self._num_tokens -= len(generations.pop(0).text)
        generations[-1].extend(tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > MAX_TOKENS:
            _, oldest = self._salts.popitem(last=False)
            self._num_tokens -= sum(len(generation.text) for generation in oldest)

    def longest(self, salt: str, known: TokenText) -> tuple[TokenText, int, int] | None:
        """Returns the text, place and length of the longest match of the last tokens of `known`; None: no match."""
        if salt not in self._salts or len(known) < ORDER:
            return None
        key, end = tuple(known.ids[-ORDER:]), len(known)
        texts = [(generation.text, place) for generation in reversed(self._salts[salt])
                 for place in generation.places(key) if place < len(generation.text)][:CANDIDATES]
        found = [(text.common(place, known, end, MAX_MATCH), text, place) for text, place in texts]
        if not found:
            return None
        longest = max(match for match, _, _ in found)
        best = [(text, place) for match, text, place in found if match == longest]
        next_token, _ = Counter(text.ids[place] for text, place in best).most_common(1)[0]
        text, place = next((text, place) for text, place in best if text.ids[place] == next_token)
        return text, place, longest


class SuffixLookup:
    """Looks up the last tokens of one request in the outputs under its salt."""

    def __init__(self, index: SuffixIndex, salt: str) -> None:
        self._index = index
        self._salt = salt
        self._follower = Follower()

    def guess(self, known: TokenText, most: int) -> Guess:
        """Returns up to `most` tokens that may follow `known`, a text that only grows."""
        follower = self._follower
        follower.advance(known)
        if not follower.agrees and (found := self._index.longest(self._salt, known)) is not None:
            text, place, match = found
            follower.start(text, place, len(known), match)
        tokens, match = follower.guess(known, most)
        for number, token in enumerate(tokens):
            if token == END:
                return Guess(tokens[:number], match)
        return Guess(tokens, match)

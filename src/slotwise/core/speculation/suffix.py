"""A suffix index over recent outputs: what followed the last tokens of a request in earlier outputs of its tenant.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975).  Its suffix tree is replaced by chains of equal ORDER-grams, as
LZ77 compressors have them: the last tokens lead to their latest occurrences, of which the longest match is followed,
and among equally long ones the continuation that most of them have.

    text      ... a b c x ... | ... a b c y ... | ... a b c x ...      outputs, one after another
    chain            └─────────────────┘─────────────────┘             by the tokens a b c

An output is recorded when its request ends and put into the index when a request of its salt is looked up: a server
whose batches leave no time for drafts does not pay for an index.

Memory is bounded: a salt keeps two generations of GENERATION tokens, of which the older is dropped when the newer is
full, and as many that wait to be indexed; all salts together keep MAX_TOKENS, and the salt used least recently goes
first.  Outputs are found only under their own salt, as cached prefixes are.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from slotwise.core.speculation.token_text import MAX_MATCH, Guess, TextFollower, TokenText

ORDER = 3  # tokens that must match
CANDIDATES = 8  # latest occurrences that are compared
INDEXED = 32  # tokens that a look-up puts into the index, as many as a row has between two at most: about 20 us
GENERATION = 1 << 15  # tokens; about 3.5 MB
MAX_TOKENS = 1 << 18  # of all salts
END = (1 << 32) - 1  # no token: follows each output in the text

Key = tuple[int, int, int]  # ORDER tokens


class OutputGeneration:
    """SaltOutputs one after another, and for each position the one before that ends with the same ORDER tokens."""

    __slots__ = ("_before", "_last", "text")

    def __init__(self) -> None:
        self.text = TokenText()
        self._last: dict[Key, int] = {}  # the position after their last occurrence
        self._before = array("i", [0] * ORDER)  # by position; 0: none

    def extend(self, tokens: Sequence[int]) -> None:
        text, last, before = self.text, self._last, self._before
        begin = max(0, len(text) - ORDER + 1)  # of the first ORDER tokens of which the last is new
        text.extend(tokens)
        ids = text.ids[begin:].tolist()
        for place, key in enumerate(zip(ids, ids[1:], ids[2:], strict=False), begin + ORDER):
            before.append(last.get(key, 0))
            last[key] = place

    def places(self, key: Key) -> list[int]:
        """Returns the positions after the latest occurrences of ORDER tokens."""
        found: list[int] = []
        place = self._last.get(key, 0)
        while place and len(found) < CANDIDATES:
            found.append(place)
            place = self._before[place]
        return found


class SaltOutputs:
    """Recent outputs of one salt."""

    def __init__(self) -> None:
        self._generations = [OutputGeneration()]  # the newest last
        self._waiting: deque[array[int]] = deque()  # to be indexed; of the last one perhaps a part is
        self._num_waiting = 0

    @property
    def num_tokens(self) -> int:
        return self._num_waiting + sum([len(one.text) for one in self._generations])

    def add(self, output: Sequence[int]) -> None:
        """Record an output of at most GENERATION tokens."""
        tokens = array("I", output)
        tokens.append(END)
        self._waiting.append(tokens)
        self._num_waiting += len(tokens)
        while self._num_waiting > GENERATION:
            self._num_waiting -= len(self._waiting.popleft())

    def index(self, most: int) -> None:
        """Put up to `most` of the recorded tokens into the index, the oldest first."""
        while self._waiting and most > 0:
            tokens = self._waiting.popleft()
            if len(tokens) > most:
                self._waiting.appendleft(tokens[most:])
                tokens = tokens[:most]
            most -= len(tokens)
            self._num_waiting -= len(tokens)
            if len(self._generations[-1].text) + len(tokens) > GENERATION:
                self._generations = [self._generations[-1], OutputGeneration()]
            self._generations[-1].extend(tokens)

    def longest(self, known: TokenText) -> tuple[TokenText, int, int] | None:
        """Returns the text, place and length of the longest match of the last tokens of `known`; None: no match."""
        if len(known) < ORDER:
            return None
        first, second, third = known.ids[-ORDER:]
        end = len(known)
        texts = [(generation.text, place) for generation in reversed(self._generations)
                 for place in generation.places((first, second, third)) if place < len(generation.text)][:CANDIDATES]
        found = [(text.common(place, known, end, MAX_MATCH), text, place) for text, place in texts]
        if not found:
            return None
        longest = max(match for match, _, _ in found)
        best = [(text, place) for match, text, place in found if match == longest]
        next_token, _ = Counter(text.ids[place] for text, place in best).most_common(1)[0]
        text, place = next((text, place) for text, place in best if text.ids[place] == next_token)
        return text, place, longest


class SuffixIndex:
    """Recent outputs by salt."""

    def __init__(self) -> None:
        self._salts: OrderedDict[str, SaltOutputs] = OrderedDict()  # the one used last at the end
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Record an output; the salts used least recently go while there are more than MAX_TOKENS."""
        outputs = self._salts.pop(salt, None) or SaltOutputs()
        self._salts[salt] = outputs
        before = outputs.num_tokens
        outputs.add(output)
        self._num_tokens += outputs.num_tokens - before
        while self._num_tokens > MAX_TOKENS:
            _, oldest = self._salts.popitem(last=False)
            self._num_tokens -= oldest.num_tokens

    def longest(self, salt: str, known: TokenText) -> tuple[TokenText, int, int] | None:
        """As `SaltOutputs.longest`, of the outputs of a salt, after indexing a part of those that wait."""
        outputs = self._salts.get(salt)
        if outputs is None:
            return None
        before = outputs.num_tokens
        outputs.index(INDEXED)
        self._num_tokens += outputs.num_tokens - before  # a generation may have been dropped
        return outputs.longest(known)


class SuffixLookup:
    """Looks up the last tokens of one request in the outputs under its salt."""

    def __init__(self, index: SuffixIndex, salt: str) -> None:
        self._index = index
        self._salt = salt
        self._follower = TextFollower()

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

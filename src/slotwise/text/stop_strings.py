"""The text of one continuation, from its tokens as they are generated.

A special token has no text, and yet a stop string may spell it.  It then stands in the text that is searched as one
character, a lone surrogate, which no decoded text has, and is left out of the text that is returned:

    tokens      Hi .  <|im_start|>  user         stop string    <|im_start|>user
    searched    Hi.\\ud800user                   searched for   \\ud800user, and as it is spelled
    returned    Hi.

Stop strings end a text, are not part of it, and may begin in one token and end in another.  All stop strings are
searched together, by comparisons of whole strings.  A stop string can be complete only after its last character, so the
strings are grouped by that.  The text held back is the longest end of the text that begins a stop string: its start
only moves forwards, and one binary search in the sorted stop strings tests one start.  A character therefore costs a
constant number of searches on average, however many stop strings there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from slotwise.text.detokenizer import Detokenizer, MarkingDetokenizer, detokenizer
from slotwise.text.tokenizer import Tokenizer

# -- stop strings ------------------------------------------------------------------------------------------------------


class StopSearch(NamedTuple):
    """`text` may be returned; the rest could still be the beginning of a stop string.  `stop` is the one found."""

    text: str
    stop: str | None


class _StopIndex:
    """Several stop strings, arranged for searching."""

    __slots__ = ("by_last", "firsts", "longest", "ordered")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.ordered = sorted(set(stops))
        self.firsts = frozenset(stop[0] for stop in stops)
        self.longest = max(map(len, stops), default=0)
        by_last: dict[str, list[str]] = {}
        for stop in self.ordered:
            by_last.setdefault(stop[-1], []).append(stop)
        self.by_last = {last: tuple(ending) for last, ending in by_last.items()}

    def complete(self, text: str, checked: int) -> tuple[int, str] | None:
        """The first end after `checked` characters at which a stop string is complete, and the longest of those."""
        for end, character in enumerate(text[checked:], checked + 1):
            stops = self.by_last.get(character)
            if stops is not None and text.endswith(stops, 0, end):
                return end, max((stop for stop in stops if text.endswith(stop, 0, end)), key=len)
        return None

    def safe(self, text: str) -> int:
        """How many characters no stop string can begin in.  In `text` none is complete."""
        for start in range(max(0, len(text) - self.longest + 1), len(text)):
            if text[start] in self.firsts:
                end = text[start:]
                place = bisect_left(self.ordered, end)
                if place < len(self.ordered) and self.ordered[place].startswith(end):
                    return start
        return len(text)


_stop_index = lru_cache(maxsize=16)(_StopIndex)  # the choices of one request share one


class StopStrings:
    """Finds stop strings in a text that is fed in parts.

    The text ends before the stop string that is complete first; of those complete at the same character, before the
    longest.  How the text is divided makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = _stop_index(tuple(stops))
        self._held = ""

    def feed(self, text: str) -> StopSearch:
        """The part of the text that may be returned now."""
        stops, held = self._stops, self._held
        if not held and stops.firsts.isdisjoint(text):
            return StopSearch(text, None)
        whole = held + text
        found = stops.complete(whole, len(held))
        if found is not None:
            end, stop = found
            self._held = ""
            return StopSearch(whole[: end - len(stop)], stop)
        safe = stops.safe(whole)
        self._held = whole[safe:]
        return StopSearch(whole[:safe], None)

    def flush(self) -> str:
        """The text held back, when no stop string ended it."""
        held, self._held = self._held, ""
        return held


# -- continuations -----------------------------------------------------------------------------------------------------


class VisibleTokens(NamedTuple):
    """Which tokens have text, in addition to the ordinary ones."""

    stop: bool = False  # the stop string, or the end or stop token, that ends the output
    special: bool = False  # special tokens
    marks: Mapping[int, str] = MappingProxyType({})  # the texts of some special tokens, by id


PLAIN = VisibleTokens()
STAND_INS = range(0xD800, 0xDC00)  # those of parsers are behind these: see `api/parsers/base_parser.py`


class Continuation:
    """Detokenizes what follows `prompt_ids`, and ends at the first of the stop strings.

    Args:
        min_tokens: tokens before which stop strings are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: Sequence[str] = (),
                 min_tokens: int = 0, shown: VisibleTokens = PLAIN) -> None:
        self.num_tokens = 0  # up to the one that completed a stop string
        self.stop_reason: str | None = None  # the stop string that ended it
        begin = partial(detokenizer, tokenizer, prompt_ids, shows_special=shown.special)
        named = tokenizer.named_in(tuple(stop)) if stop else {}
        self._hidden = {} if shown.special else {
            token_id: chr(number) for token_id, number in zip(named.values(), STAND_INS, strict=False)
            if token_id not in shown.marks}
        self._left_out = {ord(character): "" for character in self._hidden.values()}
        marks = {**shown.marks, **self._hidden}
        self._detokenizer: Detokenizer = MarkingDetokenizer(begin, marks) if marks else begin()
        self._spelled = {_marked(one, named, marks): one for one in stop}  # what else ends it, by how it is searched
        self._stops = StopStrings([*self._spelled, *stop]) if stop else None
        self._min_tokens = min_tokens
        self._shows_stop = shown.stop

    @property
    def looks_for_stops(self) -> bool:
        return self._stops is not None

    def read(self, token_ids: Sequence[int], ended: str | None) -> tuple[str, int]:
        """The text that a chunk of tokens completes, and how many of them count: none after a stop string.

        Args:
            ended: why these are the last; with "stop" the last one is an end or stop token.
        """
        before = self.num_tokens
        shown = len(token_ids) - (ended == "stop")
        text = self.feed(token_ids[:shown])
        if ended:
            text += self.end(token_ids[shown:])
        return text, self.num_tokens - before

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that may be returned now.  Tokens after a stop string are left out and not counted."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)
        return "".join([self._checked(token_id, self._stops) for token_id in token_ids])

    def _checked(self, token_id: int, stops: StopStrings) -> str:
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        text = self._detokenizer.feed((token_id,))
        return self._returned(text) if self.num_tokens <= self._min_tokens else self._searched(text, stops)

    def _searched(self, text: str, stops: StopStrings) -> str:
        """The part of `text` that may be returned now; sets the stop reason if a stop string ends in it."""
        text, stop = stops.feed(text)
        text = self._returned(text)
        if stop is None:
            return text
        self.stop_reason = self._spelled.get(stop, stop)
        return text + self.stop_reason if self._shows_stop else text

    def _returned(self, text: str) -> str:
        """A part of the searched text without the special tokens that stand in it for the search alone."""
        return text if not self._left_out or text.isascii() else text.translate(self._left_out)

    def end(self, terminators: Sequence[int] = ()) -> str:
        """The text held back, once no stop string can follow.

        Args:
            terminators: the end or stop token the model ended with; counted, and returned only where it is shown.
        """
        if self.stop_reason is not None:
            return ""
        self.num_tokens += len(terminators)
        has_text = self._shows_stop or not self._hidden.keys().isdisjoint(terminators)
        text = (self._detokenizer.feed(terminators) if has_text else "") + self._detokenizer.flush()
        if self._stops is None:
            return text
        text = self._searched(text, self._stops)
        return text if self.stop_reason is not None else text + self._returned(self._stops.flush())


def _marked(text: str, named: Mapping[str, int], marks: Mapping[int, str]) -> str:
    """A stop string as it stands in the searched text where the special tokens that it spells were generated."""
    for spelling, token_id in named.items():
        text = text.replace(spelling, marks.get(token_id, spelling))
    return text

r"""Token cache: tokens of the beginnings of texts, so that only what is new in a text is encoded.

A conversation comes back with every turn, longer each time.  A text is cut at boundaries over which no token reaches,
whatever stands on either side:

    <|im_start|>user\nSort this: ... │ <|im_end|>\n<|im_start|>assistant\nHere it is: ... │ <|im_end|>\n...

So the tokens of a text are those of its segments, one after another.  Segments form a tree, since texts share their
beginnings:

    "" ──► system, tools ──► first question ──► first answer, second question
                        └──► the same tools, another question

A boundary stands before a special token, at which `tokenizers` divides a text before any other rule, and, if the words
of the vocabulary end there, before a letter that begins a line.  `Boundaries` says which tokenizers have which.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import tokenizers

from slotwise.text.linear_rules import LINE_SPLITS, NEUTRAL_SPLITS, written_alike

MAX_MARK = 1024  # characters of an added token; with a longer one no text is cut before any
SEGMENT = 1024  # characters that a segment has at least, so that a text has few
MAX_BYTES = 64 << 20  # of all holders' segments
MAX_BYTES_OF_ONE = MAX_BYTES // 4  # of one holder's
NODE_BYTES = 512  # of a node without its text and tokens
LINE = r"(?<=[!-~]\n)[A-Za-z]"  # behind more space than a line's end, a word may depend on what follows it


class Boundaries:
    """Where a text may be cut into parts that are encoded separately, without a change to its tokens.

    Attributes:
        exist: whether the tokenizer has any.
        before, after: the tokens that the tokenizer adds to a text.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        added = list(inner.get_added_tokens_decoder().values())
        self._mark: re.Pattern[str] | None = None
        self._line: re.Pattern[str] | None = None
        if not any(token.single_word for token in added):  # such a token depends on what stands next to it
            if marks := _dividing(added, inner):
                self._mark = re.compile(_any_of(marks))
            if _ends_words_at_lines(inner) and not any(
                    token.lstrip or re.search(r"\n[A-Za-z]", token.content) for token in added):
                self._line = re.compile(LINE)
        whole, bare = inner.encode("a"), inner.encode("a", add_special_tokens=False).ids
        own = [place for place, which in enumerate(whole.sequence_ids) if which is not None]
        first = own[0] if own else 0
        self.before, self.after = whole.ids[:first], whole.ids[first + len(bare) :]
        self.exist = ((self._mark is not None or self._line is not None)
                      and bool(bare) and [*self.before, *bare, *self.after] == whole.ids)

    def next(self, text: str, start: int) -> int:
        """The first boundary of `text` at `start` or behind it; -1: there is none."""
        line = self._line.search(text, start) if self._line is not None else None
        end = line.start() if line is not None else len(text)
        mark = self._mark.search(text, start, end) if self._mark is not None else None
        found = mark or line
        return found.start() if found is not None else -1

    def is_at(self, text: str, place: int) -> bool:
        return any(one is not None and one.match(text, place) is not None for one in (self._mark, self._line))


def _dividing(added: Sequence[tokenizers.AddedToken], inner: tokenizers.Tokenizer) -> list[str]:
    """The added tokens before which a text is always divided, regardless of the text around them."""
    contents = [token.content for token in added]
    if max(map(len, contents), default=0) > MAX_MARK:
        return []
    rests = sorted({content[start:] for content in contents for start in range(1, len(content))})
    known = set(rests)

    def is_reached(content: str) -> bool:
        """Whether an added token may begin before `content` and reach into it."""
        place = bisect_left(rests, content)
        return (place < len(rests) and rests[place].startswith(content)) or any(
            content[:end] in known for end in range(1, len(content) + 1))

    # Tokens that are matched in the normalized text come after the others.
    comes_later = _description(inner.normalizer) != {} or any(not token.normalized for token in added)
    return [token.content for token in added
            if not (token.normalized and comes_later) and not token.lstrip and token.content
            and not token.content[0].isspace() and not is_reached(token.content)]


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of the places at which one of `texts` stands.

    Where they begin alike it branches once, so that a place takes as long with thousands of them as with a few.
    """
    kept: list[str] = []
    for text in sorted(set(texts)):
        if not kept or not text.startswith(kept[-1]):  # else the shorter one says enough
            kept.append(text)
    if len(kept) == 1:
        return re.escape(kept[0])
    shared = next(place for place, (one, other) in enumerate(zip(kept[0], kept[-1], strict=False)) if one != other)
    branches = [_any_of([text[shared:] for text in some])
                for _, some in groupby(kept, key=lambda text: text[shared])]
    return f"{re.escape(kept[0][:shared])}(?:{'|'.join(branches)})"


def _ends_words_at_lines(inner: tokenizers.Tokenizer) -> bool:
    """Whether a word ends before a letter that begins a line (`LINE`), and does not depend on what follows."""
    splits = _description(inner.pre_tokenizer)
    if _description(inner.normalizer) not in ({}, {"type": "NFC"}):
        return False
    for split in splits.get("pretokenizers", [splits]):
        kind = split.get("type")
        if kind == "ByteLevel" and not split["add_prefix_space"]:
            if split["use_regex"]:
                return True
        elif kind == "Split" and split["behavior"] == "Isolated" and not split["invert"]:
            regex = written_alike(split["pattern"].get("Regex", ""))
            if regex in LINE_SPLITS or regex not in NEUTRAL_SPLITS:
                return regex in LINE_SPLITS
        elif kind != "Digits":
            return False
    return False


def _description(part: tokenizers.normalizers.Normalizer | tokenizers.pre_tokenizers.PreTokenizer | None,
                 ) -> dict[str, Any]:
    """What `tokenizer.json` says of a part; a sequence of one is that one."""
    if part is None:
        return {}
    found: dict[str, Any] = json.loads(part.__getstate__())
    steps = found.get("normalizers")
    return found if steps is None or len(steps) > 1 else steps[0] if steps else {}


class Missing(NamedTuple):
    """What is to be encoded of a text.

    Attributes:
        ids: tokens of the text's beginning, which are known.
        segments: the rest of the text, in parts.
        node: where the first of them belongs; for `TokenCache.add`.
    """

    ids: list[int]
    segments: list[str]
    node: _Node


class _Node:
    """A segment, behind those of the nodes above it."""

    __slots__ = ("above", "below", "ids", "num_bytes", "text")

    def __init__(self, above: _Node | None, text: str, ids: Sequence[int]) -> None:
        self.above = above
        self.text = text
        self.ids = array("I", ids)
        self.below: dict[str, list[_Node]] = {}  # by their first characters, as many as each has at least
        self.num_bytes = NODE_BYTES + 2 * sys.getsizeof(text) + 4 * len(ids)  # a part of the text is a key as well


class _Tree:
    """The segments of one holder."""

    def __init__(self) -> None:
        self.root = _Node(None, "", ())
        self.recent: OrderedDict[_Node, None] = OrderedDict()  # least recently used first: a node before those above it
        self.num_bytes = 0

    def touch(self, node: _Node) -> None:
        """Mark `node` and those above it as the most recently used."""
        while node.above is not None:
            self.recent[node] = None
            self.recent.move_to_end(node)
            node = node.above


class TokenCache:
    """Tokens of the segments of texts, by holder: a client cannot time what another client has sent.

    Args:
        segment: characters that a segment has at least.
        max_bytes, max_bytes_of_one: of all holders' segments, and of one holder's.
    """

    def __init__(self, boundaries: Boundaries, segment: int = SEGMENT, max_bytes: int = MAX_BYTES,
                 max_bytes_of_one: int = MAX_BYTES_OF_ONE) -> None:
        self._boundaries = boundaries
        self._segment = segment
        self._max_bytes = max_bytes
        self._max_bytes_of_one = max_bytes_of_one
        self._trees: OrderedDict[str, _Tree] = OrderedDict()  # by holder, least recently used first; each has segments
        self.num_bytes = 0

    def missing(self, holder: str, text: str) -> Missing:
        """What is to be encoded of `text`, without the tokens that the tokenizer adds."""
        boundaries, size = self._boundaries, self._segment
        tree = self._trees.get(holder)
        node, place, ids = tree.root if tree is not None else _Node(None, "", ()), 0, list[int]()
        below: _Node | None = node
        while below is not None:
            node, place = below, place + len(below.text)
            ids.extend(node.ids)
            below = next((one for one in node.below.get(text[place : place + size], ())
                          if text.startswith(one.text, place) and boundaries.is_at(text, place + len(one.text))), None)
        if tree is not None:
            tree.touch(node)
            self._trees.move_to_end(holder)
        segments = list[str]()
        while place < len(text):
            end = boundaries.next(text, place + size) if place + size < len(text) else -1
            segments.append(text[place : end if end > 0 else len(text)])
            place += len(segments[-1])
        return Missing(ids, segments, node)

    def add(self, holder: str, missing: Missing, encoded: Sequence[Sequence[int]]) -> list[int]:
        """Keep what was missing, but for the last segment, which may go on in another text.

        Args:
            encoded: the tokens of each missing segment.

        Returns:
            The tokens of the whole text.
        """
        ids, node = missing.ids, missing.node
        for part in encoded:
            ids.extend(part)
        tree = self._trees.get(holder) or _Tree()
        if node.above is None:
            node = tree.root
        if len(missing.segments) > 1 and (node is tree.root or node in tree.recent):  # else it was dropped meanwhile
            for text, part in zip(missing.segments[:-1], encoded, strict=False):
                node = self._added(tree, node, text, part)
            tree.touch(node)
            self._trees[holder] = tree
            self._trees.move_to_end(holder)
            while tree.num_bytes > self._max_bytes_of_one:
                self._drop(holder)
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._trees)))
        return ids

    def _added(self, tree: _Tree, above: _Node, text: str, ids: Sequence[int]) -> _Node:
        siblings = above.below.setdefault(text[: self._segment], [])
        for sibling in siblings:
            if sibling.text == text:  # added meanwhile
                return sibling
        siblings.append(node := _Node(above, text, ids))
        tree.num_bytes += node.num_bytes
        self.num_bytes += node.num_bytes
        return node

    def _drop(self, holder: str) -> None:
        """Drop the segment of `holder` that was not used for the longest time."""
        tree = self._trees[holder]
        node, _ = tree.recent.popitem(last=False)
        assert node.above is not None
        siblings = node.above.below[node.text[: self._segment]]
        siblings.remove(node)
        if not siblings:
            del node.above.below[node.text[: self._segment]]
        tree.num_bytes -= node.num_bytes
        self.num_bytes -= node.num_bytes
        if not tree.recent:
            del self._trees[holder]

"""Incremental detokenization: token ids to text while they are generated, never half a character.

A character may be spread over several tokens.  Bytes are kept until they form characters; bytes that can no longer form
one become U+FFFD, as in the Unicode standard's "maximal subpart" practice.  The concatenated texts equal the decoding
of all bytes at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from slotwise.text.tokenizer import INTERRUPTS, TokenBytes, Tokenizer


class Detokenizer(Protocol):
    """The text of one continuation.  Special tokens have none, unless they are to be shown."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text completed by `token_ids`."""
        ...

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        ...


def detokenizer(tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, shows_special: bool = False) -> Detokenizer:
    """A detokenizer for what follows `prompt_ids`.

    SentencePiece texts lose the space before their first token; a continuation does not begin a text, so it keeps its
    space unless only tokens without text precede it.
    """
    if tokenizer.bytes_by_id is None:
        return WindowDetokenizer(tokenizer, prompt_ids, shows_special=shows_special)
    hidden: frozenset[int] = frozenset() if shows_special else tokenizer.special_ids
    begins = tokenizer.bytes_by_id.drops_leading_space and hidden.issuperset(prompt_ids)
    return ByteDetokenizer(tokenizer.bytes_by_id, hidden, begins_text=begins)


class TextOffsets:
    """Where tokens begin in a text: characters before the one that a token begins with, or within.

        bytes       E4 BD A0  E5 A5 BD  61
        tokens      AA AA BB  CC CC CC  DD
        offsets     0     0   1         2

    A token without text stands where the next one begins.

    Args:
        inner: of the text.
        before: characters that stand before it.
    """

    def __init__(self, inner: Detokenizer, before: int = 0) -> None:
        self._inner, self._length = inner, before

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._inner.feed((token_id,)))
        return offsets


class MarkingDetokenizer:
    """Writes some special tokens as texts of their own; each begins the text anew.

    Args:
        begin: returns a detokenizer of the text between two of them.
        marks: texts by token id.
    """

    def __init__(self, begin: Callable[[], Detokenizer], marks: Mapping[int, str]) -> None:
        self._begin, self._marks = begin, marks
        self._inner = begin()

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._marks.keys().isdisjoint(token_ids):
            return self._inner.feed(token_ids)
        return "".join([self._marked(token_id) if token_id in self._marks else self._inner.feed((token_id,))
                        for token_id in token_ids])

    def _marked(self, token_id: int) -> str:
        before = self._inner.flush()
        self._inner = self._begin()
        return before + self._marks[token_id]

    def flush(self) -> str:
        return self._inner.flush()


class ByteDetokenizer:
    """For vocabularies whose texts are the concatenation of their tokens' bytes.  Constant time per token.

    Differs from `tokenizers` in one case: that library replaces every byte of a run of "<0x..>" tokens when any of
    them is invalid, for which the whole run would have to be held back.
    """

    def __init__(self, token_bytes: TokenBytes, hidden_ids: frozenset[int], *, begins_text: bool) -> None:
        self._bytes_by_id = token_bytes
        self._hidden_ids = hidden_ids
        self._begins_text = begins_text
        self._left = b""  # at most three bytes of an incomplete character

    def feed(self, token_ids: Sequence[int]) -> str:
        if not self._hidden_ids.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        token_bytes = list(map(self._bytes_by_id.__getitem__, token_ids))
        if self._begins_text:
            self._begin(token_ids, token_bytes)
        data = self._left + b"".join(token_bytes)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._left = data[used:]
        return text

    def _begin(self, token_ids: Sequence[int], token_bytes: list[bytes]) -> None:
        for i, data in enumerate(token_bytes):
            if data:  # an unknown id has no bytes, and does not begin the text
                token_bytes[i] = self._bytes_by_id.first(token_ids[i])
                self._begins_text = False
                return

    def flush(self) -> str:
        left, self._left = self._left, b""
        return left.decode("utf-8", errors="replace")


class WindowDetokenizer:
    """For all other decoders: `tokenizers` decodes a window of recent tokens again at each token.

    Text that the window cannot decide follows at the end, from one decoding of everything.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._prompt = [i for i in prompt_ids if i not in tokenizer.special_ids][-8:]  # enough for word boundaries
        self._skips = not shows_special
        self._stream: DecodeStream | None = DecodeStream(ids=self._prompt, skip_special_tokens=self._skips)
        self._ids: list[int] = []
        self._length = 0  # characters returned

    def feed(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        text = "".join(self._step(token_id) for token_id in token_ids)
        self._length += len(text)
        return text

    def _step(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._tokenizer.inner, token_id) or ""
        except INTERRUPTS:
            raise
        except BaseException:  # its decoder panics, or changes text already returned; the rest follows at the end
            self._stream = None
            return ""

    def flush(self) -> str:
        before = len(self._decoded(self._prompt))
        rest = self._decoded(self._prompt + self._ids)[before + self._length :]
        self._length += len(rest)
        return rest

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)

"""Tokenizing for a worker process (see `server.worker`): some tokenizers' rules take any time for a text."""

from __future__ import annotations

from functools import lru_cache

from slotwise.text.tokenizer import Tokenizer, no_panic_messages


@lru_cache(1)
def _loaded(folder: str) -> Tokenizer:
    return Tokenizer.load(folder)


def encode(folder: str, text: str, add_special_tokens: bool) -> list[int]:
    """See `Tokenizer.encode`."""
    tokenizer = _loaded(folder)
    with no_panic_messages():  # a regular expression that backtracks too often is a panic of the library
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


CALLS = {"encode": encode}

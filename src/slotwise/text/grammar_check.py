"""Compiles grammars to check them, in a worker process: see `server.grammars`.

The vocabulary is one of single bytes and the model's special tokens, which a grammar may name: what a grammar costs
does not depend on the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from slotwise.grammars import compiled, tokenizer_of

NUM_BYTES = 256


def check(kind: str, text: str, special: Sequence[str]) -> str:
    """Why a grammar cannot be used; "" if it can."""
    return compiled(_bytes_and(tuple(special)), kind, text)[1]


@lru_cache(1)
def _bytes_and(special: tuple[str, ...]) -> Any:
    tokens = [*(bytes([byte]) for byte in range(NUM_BYTES)), *map(str.encode, special), b"<end>"]
    eos = len(tokens) - 1
    return tokenizer_of(tokens, range(NUM_BYTES, eos), [eos], len(tokens), lambda text: list(text.encode()))


CALLS: dict[str, Callable[..., Any]] = {"check": check}

"""Tokenizing for a worker process (see `server.worker_process`): some tokenizers' rules take any time for a text."""

from __future__ import annotations

from functools import lru_cache

from slotwise.text.tokenizer import Tokenizer, TokenizerError, no_panic_messages


class Changed(Exception):
    """The folder does not hold the tokenizer that it held when the server started."""


@lru_cache(1)
def _loaded(folder: str, digest: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise Changed from error  # it was usable then
    if tokenizer.digest != digest:
        raise Changed
    return tokenizer


def encode(folder: str, digest: str, text: str, add_special_tokens: bool, wants_offsets: bool) -> list[int] | None:
    """See `Tokenizer.encode`, or `Tokenizer.offsets`.

    Args:
        folder: of the tokenizer, which is loaded by the first call of a process.
        digest: of the tokenizer as the server has loaded it.

    Returns:
        None if the folder holds another one now.
    """
    try:
        tokenizer = _loaded(folder, digest)
    except Changed:
        return None
    with no_panic_messages():  # a regular expression that backtracks too often is a panic of the library
        call = tokenizer.offsets if wants_offsets else tokenizer.encode
        return call(text, add_special_tokens=add_special_tokens)


CALLS = {"encode": encode}

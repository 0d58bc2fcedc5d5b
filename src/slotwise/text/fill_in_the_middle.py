"""Prompts with a gap: the text before it, the text behind it, and the tokens by which a model knows both.

    prefix, suffix, middle      <|fim_prefix|> before <|fim_suffix|> behind <|fim_middle|>     the output fills the gap

The order is that of Bavarian et al. (2022).  A model was trained for it if its tokenizer has all three tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Marks(NamedTuple):
    """The tokens before each part."""

    prefix: str
    suffix: str
    middle: str

    def prompt(self, before: str, behind: str) -> str:
        """The prompt whose continuation stands between `before` and `behind`."""
        return f"{self.prefix}{before}{self.suffix}{behind}{self.middle}"


KNOWN = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder's tokenizer
)


def marks_of(added_tokens: Collection[str]) -> Marks | None:
    """The marks of a tokenizer with these added tokens; None where it has none that are known."""
    return next((marks for marks in KNOWN if all(mark in added_tokens for mark in marks)), None)

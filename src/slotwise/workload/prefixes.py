"""Prompt prefixes that requests share, as with one system prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, cast

from slotwise.workload import forms
from slotwise.workload.lengths import MAX_LENGTH

MAX_GROUPS = 100_000
NO_GROUP = -1


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`groups` prefixes of `tokens` each, put before the drawn prompts.  0 and 0: none.

    Raises:
        ValueError: a number out of range, or groups without tokens.
    """

    groups: int = 0
    tokens: int = 0
    form: ClassVar[str] = "GROUPS:TOKENS"

    def __post_init__(self) -> None:
        forms.require_within("groups of prefixes", self.groups, 0, MAX_GROUPS)
        forms.require_within("tokens of a prefix", self.tokens, 0, MAX_LENGTH)
        if (self.groups == 0) != (self.tokens == 0):
            raise ValueError("a prefix needs both groups and tokens: GROUPS:TOKENS")

    def __str__(self) -> str:
        return f"{self.groups}:{self.tokens}"

    def draw(self, rng: random.Random) -> int:
        """Returns a uniformly drawn group; -1 when there are none."""
        return forms.below(rng, self.groups) if self.groups else NO_GROUP


def parse(text: str) -> Prefixes:
    """Returns the prefixes that `text` describes; raises ValueError with one line that shows the form."""
    return cast(Prefixes, forms.parse(f"prefix:{text}", {"prefix": Prefixes}, "prefix"))

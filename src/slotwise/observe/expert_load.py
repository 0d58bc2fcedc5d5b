"""How a model's experts share the tokens: by layer, since the engine started and lately.

A layer in which all experts have equally many tokens has an imbalance of 1; one whose tokens all go to the same
`top_k` experts has `num_experts / top_k`.  A step that reads few weights for its tokens is short, so imbalance costs
little while steps are bound by memory; where experts are spread over devices, the busiest one sets the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add, sub
from typing import Any

LATELY = 60  # counts that `imbalance` and `idle` look at: one a second while there is work, and one at its end

Counts = Sequence[Sequence[int]]
"""Tokens of each expert of each layer."""


class ExpertLoad:
    """A fold over the counts of step records.

    Args:
        layers: numbers of the layers with experts.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._all: list[list[int]] = [[] for _ in layers]
        self._lately: list[list[int]] = [[] for _ in layers]
        self._latest: deque[Counts] = deque()

    def add(self, counts: Counts) -> None:
        """Adds what one record has, a row for each of `layers`."""
        self._all, self._lately = _sum(self._all, counts), _sum(self._lately, counts)
        self._latest.append(counts)
        if len(self._latest) > LATELY:
            self._lately = [list(map(sub, *rows)) for rows in zip(self._lately, self._latest.popleft(), strict=True)]

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens times the experts that each chose, by layer."""
        return {str(layer): sum(row) for layer, row in zip(self.layers, self._all, strict=True)}

    @property
    def imbalance(self) -> dict[str, float]:
        """Tokens of the busiest expert per mean of all lately, by layer; 0 where there are none."""
        return {str(layer): _imbalance(row) for layer, row in zip(self.layers, self._lately, strict=True)}

    @property
    def idle(self) -> dict[str, int]:
        """Experts that no token chose lately, by layer."""
        return {str(layer): row.count(0) for layer, row in zip(self.layers, self._lately, strict=True)}

    def table(self) -> list[dict[str, Any]]:
        """Everything, as JSON has it: a layer's experts in order."""
        return [
            {"layer": layer, "tokens": whole, "tokens_lately": lately, "imbalance_lately": _imbalance(lately)}
            for layer, whole, lately in zip(self.layers, self._all, self._lately, strict=True)]


def _sum(totals: Counts, counts: Counts) -> list[list[int]]:
    return [list(map(add, total, row)) if total else list(row) for total, row in zip(totals, counts, strict=True)]


def _imbalance(row: Sequence[int]) -> float:
    return max(row) * len(row) / total if (total := sum(row)) else 0.0

"""The budget of reasoning: once it is used up, the token that ends the reasoning follows.

    outputs     <think>  a  b  c           a  b  c            of 3 tokens
    next        </think>                   </think>           the prompt has begun the reasoning

The end gets a logit beside which no other counts, after all other edits; the mask of a grammar still holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slotwise.core.params import ThinkingBudget

CERTAIN = 1e9  # a logit: at any temperature the probability of all other tokens is 0 in float32


class Reasoning:
    """Where the reasoning of one request begins and ends among its outputs, on the host.

    Args:
        outputs: those so far.
    """

    def __init__(self, budget: ThinkingBudget, outputs: Sequence[int]) -> None:
        self._budget = budget
        self._num_outputs = 0
        self._begin: int | None = 0 if budget.begin_id is None else None  # the output that is its first token
        self._end: int | None = None  # the output that ends it
        for token in outputs:
            self.record(token)

    def record(self, token: int) -> None:
        """Record `token` as the next output."""
        if self._begin is None and token == self._budget.begin_id:
            self._begin = self._num_outputs + 1
        if self._end is None and token == self._budget.end_id:
            self._end = self._num_outputs
        self._num_outputs += 1

    def forget_after(self, num_outputs: int) -> None:
        """Remove outputs of a step that failed and is run again."""
        if num_outputs > self._num_outputs:
            raise ValueError(f"a token is wanted after {num_outputs} outputs, of which {self._num_outputs} are known")
        self._num_outputs = num_outputs
        if self._begin is not None and self._begin > num_outputs:
            self._begin = None
        if self._end is not None and self._end >= num_outputs:
            self._end = None

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Edit `logits [vocab]` in place for the token that follows the outputs."""
        is_open = self._begin is not None and self._end is None
        if is_open and self._num_outputs - (self._begin or 0) >= self._budget.num_tokens:
            logits[self._budget.end_id] = CERTAIN


def end_reasoning(logits: Tensor, outputs: Tensor, budget: ThinkingBudget) -> None:
    """Edit `logits [vocab]` float32 in place for the token that follows `outputs [num_outputs]`, without waiting."""
    num_before = len(outputs) - budget.num_tokens  # where its first token stands if the budget is used up
    if num_before < (0 if budget.begin_id is None else 1):
        return
    ends = (outputs != budget.end_id).all()
    if budget.begin_id is not None:
        ends &= (outputs[:num_before] == budget.begin_id).any()
    at = slice(budget.end_id, budget.end_id + 1)
    logits[at] = logits[at].masked_fill(ends, CERTAIN)

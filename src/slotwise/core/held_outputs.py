"""Outputs of a step, and those not published yet because their batch leaves together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from slotwise.core.step import StepPlan, StepResult, TokenLogprobs

Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


class Outputs(NamedTuple):
    """Outputs that a step publishes: columns, one entry a request."""

    request_ids: Sequence[str]
    tokens: Sequence[Tokens]
    logprobs: Sequence[Logprobs]  # an entry is () for a request without log-probabilities


def outputs_of(plan: StepPlan, result: StepResult, kept: Mapping[int, Tokens]) -> Outputs:
    """Returns the tokens each row sampled; for rows in `kept` the tokens kept, and no entry if none were."""
    logprobs: Sequence[Logprobs] = result.logprobs or ((),) * plan.num_rows
    if not kept:
        return Outputs(plan.request_ids, result.tokens, logprobs)
    tokens, logprobs = list(result.tokens), list(logprobs)
    for row, some in kept.items():
        tokens[row], logprobs[row] = some, logprobs[row][: len(some)]
    return Outputs(
        list(compress(plan.request_ids, tokens)), list(compress(tokens, tokens)), list(compress(logprobs, tokens)))


class HeldOutputs:
    """Held tokens and log-probabilities by request.  False while empty."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tokens, Logprobs]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, outputs: Outputs) -> None:
        """Append `outputs` to what is held for each request."""
        for request_id, tokens, logprobs in zip(*outputs, strict=True):
            before = self._kept.get(request_id, ((), ()))
            self._kept[request_id] = (before[0] + tokens, before[1] + logprobs)

    def drop(self, request_id: str) -> None:
        """Discard what is held for a request."""
        self._kept.pop(request_id, None)

    def release(self, request_ids: Iterable[str]) -> Outputs:
        """Remove and return what is held for these requests."""
        found = [(request_id, *self._kept.pop(request_id)) for request_id in request_ids if request_id in self._kept]
        return Outputs(*zip(*found, strict=True)) if found else Outputs((), (), ())

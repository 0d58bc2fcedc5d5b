"""Sampled tokens that are not published yet, because their batch leaves together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slotwise.core.step import TokenLogprobs

Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


class Outputs(NamedTuple):
    """Outputs that a step publishes: columns, one entry a request."""

    request_ids: Sequence[str]
    tokens: Sequence[Tokens]
    logprobs: Sequence[Logprobs]  # an entry is () for a request without log-probabilities


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

"""Tokens that were sampled and are told to nobody yet, because their batch returns as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slotwise.core.step import TokenLogprobs

Tokens = tuple[int, ...]
Logprobs = tuple[TokenLogprobs, ...]


class Outputs(NamedTuple):
    """What a step makes known: columns, one entry a request."""

    request_ids: Sequence[str]
    tokens: Sequence[Tokens]
    logprobs: Sequence[Logprobs]  # an entry is () where nobody asked


class HeldOutputs:
    """Falsy while it holds nothing."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tokens, Logprobs]] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, outputs: Outputs) -> None:
        """Add to what is kept of each request."""
        for request_id, tokens, logprobs in zip(*outputs, strict=True):
            before = self._kept.get(request_id, ((), ()))
            self._kept[request_id] = (before[0] + tokens, before[1] + logprobs)

    def drop(self, request_id: str) -> None:
        """Its client will never see them."""
        self._kept.pop(request_id, None)

    def release(self, request_ids: Iterable[str]) -> Outputs:
        """All that is kept of these requests."""
        found = [(request_id, *self._kept.pop(request_id)) for request_id in request_ids if request_id in self._kept]
        return Outputs(*zip(*found, strict=True)) if found else Outputs((), (), ())

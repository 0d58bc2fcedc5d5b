"""Predicts output lengths from finished requests, by tenant and prompt length."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque

KEPT = 128  # latest lengths of a kind that a prediction uses
ENOUGH = 8  # lengths a kind needs; with fewer, a wider kind is used
MAX_KINDS = 4096  # beyond, the least recently updated kind is dropped

PARTS = (4, 2)  # buckets of prompt lengths per doubling: narrow ones, and wide ones for when those have too few lengths

Bucket = tuple[int, int]  # buckets per doubling, index
Kind = tuple[str, Bucket]  # a tenant, "" for all; a prompt length's bucket, ALL for any
ALL = (0, 0)


class Lengths:
    """The latest lengths of one kind, in order."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, length: int) -> None:
        if len(self._latest) == KEPT:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float, beyond: int) -> float:
        """Returns the quantile of the lengths above `beyond`; `beyond` itself if there are none."""
        longer = [length for length in self._sorted if length > beyond]
        return longer[min(len(longer) - 1, int(share * len(longer)))] if longer else beyond


class Guesses:
    """Predicts the quantile `share`, between 0 and 1."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._kinds: OrderedDict[Kind, Lengths] = OrderedDict()

    def learn(self, tenant: str, num_prompt: int, num_output: int) -> None:
        for kind in _kinds(tenant, num_prompt):
            lengths = self._kinds.setdefault(kind, Lengths())
            self._kinds.move_to_end(kind)
            lengths.add(num_output)
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def guess(self, tenant: str, num_prompt: int, done: int) -> float | None:
        """Returns the predicted output tokens in total, given `done` so far; None: too few lengths."""
        for kind in _kinds(tenant, num_prompt):
            lengths = self._kinds.get(kind)
            if lengths is not None and len(lengths) >= ENOUGH:
                return lengths.quantile(self._share, done)
        return None


def _kinds(tenant: str, num_prompt: int) -> tuple[Kind, ...]:
    """Returns the kinds of a request, from the narrowest to the widest."""
    buckets = (*(_bucket(num_prompt, parts) for parts in PARTS), ALL)
    return tuple(dict.fromkeys((whose, bucket) for bucket in buckets for whose in (tenant, "")))


def _bucket(num_prompt: int, parts: int) -> Bucket:
    """Returns the bucket of a prompt length, with `parts` buckets per doubling."""
    doublings = max(0, num_prompt.bit_length() - 1)
    return parts, doublings * parts + (num_prompt * parts >> doublings)

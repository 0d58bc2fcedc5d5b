"""How long an answer will be, guessed from those there were: by whose it is, and by how long the prompt is."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque

KEPT = 128  # lengths of a kind that a guess is made from
ENOUGH = 8  # fewer say nothing; a wider kind is asked
MAX_KINDS = 4096  # whoever was heard of least lately is forgotten

PARTS = (4, 2)  # buckets of prompt lengths to each doubling: narrow ones, and wider ones where those know too little

Bucket = tuple[int, int]  # of how many to a doubling, which one
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
        """Of those lengths that are more than `beyond`; `beyond` itself when none is."""
        longer = [length for length in self._sorted if length > beyond]
        return longer[min(len(longer) - 1, int(share * len(longer)))] if longer else beyond


class Guesses:
    """Args: share: the quantile that is guessed, between 0 and 1."""

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
        """Tokens of the whole answer, of which `done` are there; None: too little is known."""
        for kind in _kinds(tenant, num_prompt):
            lengths = self._kinds.get(kind)
            if lengths is not None and len(lengths) >= ENOUGH:
                return lengths.quantile(self._share, done)
        return None


def _kinds(tenant: str, num_prompt: int) -> tuple[Kind, ...]:
    """From the closest to the widest."""
    buckets = (*(_bucket(num_prompt, parts) for parts in PARTS), ALL)
    return tuple(dict.fromkeys((whose, bucket) for bucket in buckets for whose in (tenant, "")))


def _bucket(num_prompt: int, parts: int) -> Bucket:
    """So many to each doubling."""
    doublings = max(0, num_prompt.bit_length() - 1)
    return parts, doublings * parts + (num_prompt * parts >> doublings)

"""Shortest remaining work first, by predicted output length, with ageing.

Output lengths are unknown.  But outputs for the same tenant's prompts of similar length resemble each other, and
serving probably short requests first lowers the mean latency of a backlog (Shahout et al., 2024, and others, train
predictors for it; a running quantile needs no model and no training).

A request's rank is its remaining work, in tokens, plus its arrival time in seconds times `ageing`.  So no request that
arrives more than (work / ageing) seconds later goes before it, where work is at most `max_model_len`.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque

from slotwise.core.interfaces import Key
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import Request

PROMPT_SHARE = 1 / 16  # work of a prompt token, in output tokens: prefill computes many tokens at once


class Shortest(FirstComeFirstServed):
    """
    Args:
        ageing: tokens of work that a second of waiting makes up for.
        quantile: of the output lengths of similar requests, used as the prediction.
        oracle: use output lengths fixed by a benchmark instead of predictions.
    """

    def __init__(self, ageing: float, quantile: float, *, oracle: bool = False) -> None:
        self._ageing = ageing
        self._guesses = Guesses(quantile)
        self._oracle = oracle

    def waiting_key(self, request: Request, now: float) -> Key:
        return (self._work(request) + request.arrived_at * self._ageing,)

    def victim_key(self, request: Request, now: float) -> Key:
        return (0, self._work(request))

    def _work(self, request: Request) -> float:
        """Returns the remaining work, in output tokens."""
        prompt = (len(request.tokens) - request.num_computed) * PROMPT_SHARE
        return prompt + max(1.0, self._length(request) - request.num_output)

    def _length(self, request: Request) -> float:
        most = request.max_len - request.num_prompt
        if self._oracle and request.spec.forced_length:
            return min(most, request.spec.forced_length)
        guess = self._guesses.guess(request.spec.slo.tenant, request.num_prompt, request.num_output)
        return most if guess is None else min(most, guess)

    def finished(self, request: Request, reason: str, now: float) -> None:
        """Learn its output length, unless the output was cut off from outside."""
        if reason in ("stop", "length") and request.spec.pooling is None:
            self._guesses.learn(request.spec.slo.tenant, request.num_prompt, request.num_output)


KEPT = 128  # latest lengths of a kind that a prediction uses
ENOUGH = 8  # lengths a kind needs; with fewer, a wider kind is used
MAX_KINDS = 4096  # beyond, the least recently updated kind is dropped

PARTS = (4, 2)  # buckets of prompt lengths per doubling: narrow ones, and wide ones for when those have too few lengths

Bucket = tuple[int, int]  # buckets per doubling, index
Kind = tuple[str, Bucket]  # a tenant, "" for all; a prompt length's bucket, ALL for any
ALL = (0, 0)


class LatestLengths:
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
        self._kinds: OrderedDict[Kind, LatestLengths] = OrderedDict()

    def learn(self, tenant: str, num_prompt: int, num_output: int) -> None:
        for kind in _kinds(tenant, num_prompt):
            lengths = self._kinds.setdefault(kind, LatestLengths())
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

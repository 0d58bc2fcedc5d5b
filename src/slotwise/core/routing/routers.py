"""Routers: each chooses one of the replicas that may serve a request.

`LeastProduct` is LMetric (Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request
Scheduling", arXiv 2603.15202): the least product of new prefill work and batch size.  A linear combination of the two
would need weights; in a comparison of products they cancel out.  The others are baselines behind the same interface.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Protocol

from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Replica

STAY = 2.0  # a session stays where it is warm up to this multiple of the best score
MAX_SESSIONS = 1 << 16  # the least recently used are forgotten
MAX_TREE = 1 << 18  # pieces that a prefix-aware router remembers
MATCHED = 0.1  # least share of a prompt that has to match for a prefix-aware router to follow the match


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        """Returns one of `replicas`, which has at least one.  Called once for each request."""
        ...


def product(request: RoutedRequest, replica: Replica) -> float:
    """LMetric's score of a replica, lower is better: prompt tokens it would have to compute, times its batch."""
    return (replica.queued_tokens + replica.new_tokens(request)) * (replica.batch + 1)


class LeastProduct:
    """The least product, and of several equal ones the replica with the fewest cached pieces.

    Once every replica's step times are known, seconds take the place of tokens: replicas may differ.  A session stays
    with its replica while that scores at most `STAY` times the best.  A request for an adapter goes where it would not
    wait for other adapters to leave the steps, if there is such a replica.
    """

    def __init__(self, seed: int = 0) -> None:
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        replicas = [replica for replica in replicas if replica.has_place(request.adapter)] or replicas
        scores = [product(request, replica) for replica in replicas]
        if all(replica.report.prefill_rate for replica in replicas):
            scores = [score / replica.report.prefill_rate for score, replica in zip(scores, replicas, strict=True)]
        best = min(scores)
        chosen = min([replica for replica, score in zip(replicas, scores, strict=True) if score == best],
                     key=lambda replica: replica.num_pieces)
        if not request.session:
            return chosen
        last = self._sessions.pop(request.session, None)
        for replica, score in zip(replicas, scores, strict=True):
            if replica.name == last and score <= STAY * best:
                chosen = replica
        self._sessions[request.session] = chosen.name
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return chosen


class LeastUnfinished:
    """The fewest unfinished requests."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=_batch)


class RoundRobin:
    """One after the other."""

    def __init__(self, seed: int = 0) -> None:
        self._turns = count(seed)

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._turns) % len(replicas)]


class PowerOfTwo:
    """The shorter queue of two drawn at random (Mitzenmacher, 2001): Ray Serve's default."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        drawn = self._random.sample(range(len(replicas)), min(2, len(replicas)))
        return min([replicas[index] for index in drawn], key=_batch)


class PrefixAware:
    """The replica that was sent most of the prompt's beginning, as Ray Serve's prefix-aware router has it.

    Where less than a tenth of the prompt matches, it is the replica that was sent least.  Where the longest queue
    exceeds the shortest by more than `imbalance` requests, two are drawn as in `PowerOfTwo`; Ray's default is infinite.
    The router remembers what it sent, not what replicas have cached.
    """

    def __init__(self, seed: int = 0, imbalance: float = inf) -> None:
        self._others = PowerOfTwo(seed)
        self._imbalance = imbalance
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._sizes: Counter[str] = Counter()  # pieces remembered, by replica

    def choose(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        batches = list(map(_batch, replicas))
        if max(batches) - min(batches) > self._imbalance:
            chosen = self._others.choose(request, replicas)
        else:
            chosen = self._matching(request, replicas)
        for piece in request.digests:
            self._sizes[chosen.name] += (chosen.name, piece) not in self._sent
            self._sent[chosen.name, piece] = None
            self._sent.move_to_end((chosen.name, piece))
        while len(self._sent) > MAX_TREE:
            (name, _), _ = self._sent.popitem(last=False)
            self._sizes[name] -= 1
        return chosen

    def _matching(self, request: RoutedRequest, replicas: Sequence[Replica]) -> Replica:
        lengths = [self._matched(request, replica.name) for replica in replicas]
        longest = max(lengths)
        if not longest or longest * request.piece_tokens < MATCHED * request.num_tokens:
            return min(replicas, key=lambda replica: self._sizes[replica.name])
        return min([replica for replica, length in zip(replicas, lengths, strict=True) if length == longest],
                   key=_batch)

    def _matched(self, request: RoutedRequest, name: str) -> int:
        for length, piece in enumerate(request.digests):
            if (name, piece) not in self._sent:
                return length
        return len(request.digests)


def _batch(replica: Replica) -> int:
    return replica.batch


ROUTERS: dict[str, Callable[[int], Router]] = {
    "product": LeastProduct, "least-unfinished": LeastUnfinished, "round-robin": RoundRobin, "power-of-two": PowerOfTwo,
    "prefix-aware": PrefixAware}
"""By the names of `--router`; each is called with a seed."""

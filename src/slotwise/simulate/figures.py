"""The figures of simulated or measured requests: latencies, throughput, goodput and refusals.

    arrived          token   token      token
       │               │       │          │
       ├──── TTFT ─────┼─ ITL ─┼── ITL ───┤        TPOT = (last token − first token) / (tokens − 1)
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, compress, islice, repeat
from math import ceil
from operator import mul, sub
from typing import NamedTuple

from slotwise.simulate.requests import REFUSED, SERVED, SimulatedRequest


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds for goodput; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, request: SimulatedRequest) -> bool:
        ttft = request.ttft
        if request.reason not in SERVED or ttft is None:
            return False
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or request.tpot <= self.tpot)


ANY = Objectives()
WORDS = {"ttft_p50": "first token, p50", "ttft_p99": "first token, p99", "itl_p50": "between tokens, p50",
         "itl_p99": "between tokens, p99", "output_throughput": "output tokens a second",
         "goodput": "goodput, requests a second", "served": "requests served", "refused": "requests refused"}
BUCKETS = 1_000_000  # a second, of the values that quantiles are taken of


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, and rates a second from the first arrival to the last end.  Latencies are 0 where there are none."""

    requests: int
    served: int
    refused: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    output_throughput: float  # tokens
    goodput: float  # requests within the objectives

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def figures(requests: Sequence[SimulatedRequest], objectives: Objectives = ANY) -> Figures:
    """Returns the figures of requests."""
    first, gaps = Distribution(), gaps_of(requests)
    waits = [ttft for request in requests if (ttft := request.ttft) is not None]
    first.add(Part(lambda: waits, lambda: repeat(1)))
    ends = [max(request.ended, request.arrived) for request in requests]
    seconds = max(ends, default=0.0) - min([request.arrived for request in requests], default=0.0)
    rate = 1 / seconds if seconds > 0 else 0.0
    reasons = Counter(request.reason for request in requests)
    (ttft_p50, ttft_p99), (itl_p50, itl_p99) = first.quantiles(0.5, 0.99), gaps.quantiles(0.5, 0.99)
    return Figures(
        len(requests), sum(reasons[reason] for reason in SERVED), reasons[REFUSED],
        ttft_p50, ttft_p99, itl_p50, itl_p99, sum(request.num_tokens for request in requests) * rate,
        sum(map(objectives.met, requests)) * rate)


class Part(NamedTuple):
    """Reads values, and the weight of each, any number of times."""

    values: Callable[[], Iterable[float]]
    weights: Callable[[], Iterable[int]]  # at least as many

    def buckets(self) -> Iterable[int]:
        """The bucket of each value; a million steps are read without a loop in Python."""
        return map(int, map(mul, self.values(), repeat(BUCKETS)))


class Distribution:
    """Values with a weight each.  They stay where they are: a quantile reads them again, and sorts a small part.

    A part is read once to count its values by bucket.  The bucket of a quantile follows from the counts.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._buckets: defaultdict[int, int] = defaultdict(int)  # weights

    @property
    def total(self) -> int:
        """The sum of all weights."""
        return sum(self._buckets.values())

    def add(self, part: Part) -> None:
        self._parts.append(part)
        buckets = self._buckets
        for bucket, weight in zip(part.buckets(), part.weights(), strict=False):
            buckets[bucket] += weight

    def quantiles(self, *shares: float) -> list[float]:
        """Returns for each share the smallest value that at least as many of all do not exceed; 0 of none."""
        buckets = sorted(self._buckets)
        ends, total = list(accumulate([self._buckets[bucket] for bucket in buckets])), self.total
        if not total:
            return [0.0] * len(shares)
        targets = [ceil(share * total) for share in shares]
        places = [bisect_left(ends, target) for target in targets]
        inside: dict[int, Counter[float]] = {buckets[place]: Counter() for place in places}
        for part in self._parts:
            weighted = zip(part.values(), part.weights(), strict=False)
            for value, weight in compress(weighted, map(inside.__contains__, part.buckets())):
                inside[int(value * BUCKETS)][value] += weight
        found = []
        for target, place in zip(targets, places, strict=True):
            within = inside[buckets[place]]
            values = sorted(within)
            before = ends[place] - within.total()
            found.append(values[bisect_left(list(accumulate([within[value] for value in values])), target - before)])
        return found


def gaps_of(requests: Iterable[SimulatedRequest]) -> Distribution:
    """Returns the seconds between the tokens of each request: a part for each clock, and one between spans."""
    clocks: dict[int, tuple[array[float], array[int]]] = {}
    pauses: Counter[float] = Counter()
    for request in requests:
        clock, spans = request.clock, request.spans
        if not spans:
            continue
        _, changes = clocks.setdefault(id(clock), (clock, array("i", bytes(4 * (len(clock) + 1)))))
        for first, last in zip(spans[::2], spans[1::2], strict=True):
            changes[first + 1] += 1
            changes[last + 1] -= 1
        pauses.update([clock[first] - clock[last] for last, first in zip(spans[1:-1:2], spans[2::2], strict=True)])
    found = Distribution()
    for clock, changes in clocks.values():
        found.add(_steps_between(clock, changes))
    found.add(Part(pauses.keys, pauses.values))
    return found


def _steps_between(clock: array[float], changes: array[int]) -> Part:
    """Returns the seconds of each step from the one before, weighted by the requests that have a token of both.

    Args:
        changes: by step, how many more requests than one step before.
    """
    return Part(lambda: map(sub, islice(clock, 1, None), clock), lambda: islice(accumulate(changes), 1, None))


def grouped(requests: Mapping[str, SimulatedRequest], group_of: Mapping[str, str]) -> dict[str, list[SimulatedRequest]]:
    """Returns the requests by group, in order of the groups' names."""
    groups: dict[str, list[SimulatedRequest]] = {name: [] for name in sorted(set(group_of.values()))}
    for request_id, request in requests.items():
        groups[group_of[request_id]].append(request)
    return groups

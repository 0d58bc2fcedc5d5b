"""Simulated or measured requests: when each had its tokens, and the figures of all: latencies, throughput, goodput.

    arrived          token   token      token
       │               │       │          │
       ├──── TTFT ─────┼─ ITL ─┼── ITL ───┤        TPOT = (last token − first token) / (tokens − 1)

A token's time is that of the step of its server that sampled it.  A million requests share the clocks of their servers;
each has two numbers a span:

    clock     0.10   0.21   0.32   0.45   0.50   0.61     when each step of the server ended, in seconds
    spans            1 ─────────── 3             5 5      the request has tokens at 0.21, 0.32, 0.45 and 0.61
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, chain, compress, islice, repeat
from math import ceil
from operator import mul, sub
from statistics import fmean
from typing import NamedTuple

SERVED = ("stop", "length")  # the reasons of requests that were served whole
REFUSED = "refused"  # the reason of a request that admission control did not accept
WORDS = {"ttft_mean": "first token, mean", "ttft_p50": "first token, p50", "ttft_p99": "first token, p99",
         "itl_p50": "between tokens, p50", "itl_p99": "between tokens, p99",
         "output_throughput": "output tokens a second", "goodput": "goodput, requests a second",
         "served": "requests served", "refused": "requests refused"}
BUCKETS = 1_000_000  # a second, of the values that quantiles are taken of


def new_clock() -> array[float]:
    return array("d")


@dataclass(slots=True)
class SimulatedRequest:
    """The results of one request.  Times are seconds of the virtual clock."""

    arrived: float
    clock: array[float] = field(default_factory=new_clock)
    spans: list[int] = field(default_factory=list)  # first and last step of each span, in order
    ended: float = 0.0
    reason: str = ""  # as in the engine's records, or REFUSED
    replica: int = 0
    num_cached: int = 0  # tokens of its prompt found in the prefix cache when it was first admitted
    num_prefilled: int = 0  # tokens computed before its next one was sampled, again after a preemption
    is_admitted: bool = False

    def admitted(self, num_cached: int) -> None:
        """It got a slot, for the first time or again."""
        if not self.is_admitted:
            self.is_admitted, self.num_cached = True, num_cached

    @classmethod
    def measured(cls, arrived: float, token_times: Sequence[float], ended: float, reason: str) -> SimulatedRequest:
        """Returns a request with a clock of its own."""
        spans = [0, len(token_times) - 1] if token_times else []
        return cls(arrived, array("d", token_times), spans, ended, reason)

    def add_tokens(self, first: int, last: int) -> None:
        """A token in each step from `first` to `last`."""
        spans = self.spans
        if spans and spans[-1] == first - 1:
            spans[-1] = last
        else:
            spans += (first, last)

    @property
    def num_tokens(self) -> int:
        return sum(self.spans[1::2]) - sum(self.spans[::2]) + len(self.spans) // 2

    @property
    def first_token(self) -> float | None:
        """When its first token came; None: it has none."""
        return self.clock[self.spans[0]] if self.spans else None

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token; None: it has none."""
        return self.clock[self.spans[0]] - self.arrived if self.spans else None

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 without any."""
        number = self.num_tokens
        return (self.clock[self.spans[-1]] - self.clock[self.spans[0]]) / (number - 1) if number > 1 else 0.0

    @property
    def token_times(self) -> list[float]:
        pairs = zip(self.spans[::2], self.spans[1::2], strict=True)
        return list(chain.from_iterable(self.clock[first : last + 1] for first, last in pairs))


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits in seconds for goodput; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, request: SimulatedRequest) -> bool:
        ttft = request.ttft
        if request.reason not in SERVED or ttft is None:
            return False
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or request.tpot <= self.tpot)


ANY = LatencyLimits()


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, and rates a second from the first arrival to the last end.  Latencies are 0 where there are none."""

    requests: int
    served: int
    refused: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    output_throughput: float  # tokens
    goodput: float  # requests within the objectives

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def figures(requests: Sequence[SimulatedRequest], objectives: LatencyLimits = ANY) -> Figures:
    """Returns the figures of requests."""
    first, gaps = Distribution(), gaps_of(requests)
    waits = [ttft for request in requests if (ttft := request.ttft) is not None]
    first.add(WeightedValues(lambda: waits, lambda: repeat(1)))
    ends = [max(request.ended, request.arrived) for request in requests]
    seconds = max(ends, default=0.0) - min([request.arrived for request in requests], default=0.0)
    rate = 1 / seconds if seconds > 0 else 0.0
    reasons = Counter(request.reason for request in requests)
    (ttft_p50, ttft_p99), (itl_p50, itl_p99) = first.quantiles(0.5, 0.99), gaps.quantiles(0.5, 0.99)
    return Figures(
        len(requests), sum(reasons[reason] for reason in SERVED), reasons[REFUSED],
        fmean(waits) if waits else 0.0, ttft_p50, ttft_p99, itl_p50, itl_p99,
        sum(request.num_tokens for request in requests) * rate,
        sum(map(objectives.met, requests)) * rate)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of all do not exceed; 0 of none."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0


class WeightedValues(NamedTuple):
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
        self._parts: list[WeightedValues] = []
        self._buckets: defaultdict[int, int] = defaultdict(int)  # weights

    @property
    def total(self) -> int:
        """The sum of all weights."""
        return sum(self._buckets.values())

    def add(self, part: WeightedValues) -> None:
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
    found.add(WeightedValues(pauses.keys, pauses.values))
    return found


def _steps_between(clock: array[float], changes: array[int]) -> WeightedValues:
    """Returns the seconds of each step from the one before, weighted by the requests that have a token of both.

    Args:
        changes: by step, how many more requests than one step before.
    """
    return WeightedValues(lambda: map(sub, islice(clock, 1, None), clock), lambda: islice(accumulate(changes), 1, None))


def grouped(requests: Mapping[int, SimulatedRequest], group_of: Mapping[int, str]) -> dict[str, list[SimulatedRequest]]:
    """Returns the requests by group, in order of the groups' names."""
    groups: dict[str, list[SimulatedRequest]] = {name: [] for name in sorted(set(group_of.values()))}
    for request_id, request in requests.items():
        groups[group_of[request_id]].append(request)
    return groups

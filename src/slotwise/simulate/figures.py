"""The figures of simulated or measured requests: latencies, throughput, goodput and refusals.

    arrived          token   token      token
       │               │       │          │
       ├──── TTFT ─────┼─ ITL ─┼── ITL ───┤        TPOT = (last token − first token) / (tokens − 1)
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import ceil

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
    first.add((ttft, 1) for request in requests if (ttft := request.ttft) is not None)
    ends = [max(request.ended, request.arrived) for request in requests]
    seconds = max(ends, default=0.0) - min([request.arrived for request in requests], default=0.0)
    rate = 1 / seconds if seconds > 0 else 0.0
    reasons = Counter(request.reason for request in requests)
    return Figures(
        len(requests), sum(reasons[reason] for reason in SERVED), reasons[REFUSED], first.quantile(0.5),
        first.quantile(0.99), gaps.quantile(0.5), gaps.quantile(0.99),
        sum(request.num_tokens for request in requests) * rate, sum(map(objectives.met, requests)) * rate)


class Distribution:
    """Values with a weight each, in parts that are sorted on their own: of as many as a million requests have."""

    def __init__(self) -> None:
        self.total = 0  # of all weights
        self._parts: list[tuple[array[float], array[int]]] = []  # values, and the weights up to each

    def add(self, weighted: Iterable[tuple[float, int]]) -> None:
        """Add a part."""
        ordered = sorted(weighted)
        if ordered:
            self._parts.append((array("d", [value for value, _ in ordered]),
                                array("q", accumulate(weight for _, weight in ordered))))
            self.total += self._parts[-1][1][-1]

    def quantile(self, share: float) -> float:
        """Returns the smallest value that at least `share` of all values do not exceed; 0 of none."""
        target = ceil(share * self.total)
        found: list[float] = []
        for values, _ in self._parts:
            at = bisect_left(values, True, key=lambda value: self._at_most(value) >= target)
            found += values[at : at + 1]
        return min(found, default=0.0)

    def _at_most(self, value: float) -> int:
        """The weight of the values that do not exceed `value`."""
        number = 0
        for values, weights in self._parts:
            before = bisect_right(values, value)
            number += weights[before - 1] if before else 0
        return number


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
    found.add(pauses.items())
    return found


def _steps_between(clock: array[float], changes: array[int]) -> Iterator[tuple[float, int]]:
    """Yields the seconds from the step before, and how many requests have a token of both steps.

    Args:
        changes: by step, how many more requests than one step before.
    """
    for index, number in enumerate(accumulate(changes)):
        if number:
            yield clock[index] - clock[index - 1], number


def grouped(requests: Mapping[str, SimulatedRequest], group_of: Mapping[str, str]) -> dict[str, list[SimulatedRequest]]:
    """Returns the requests by group, in order of the groups' names."""
    groups: dict[str, list[SimulatedRequest]] = {name: [] for name in sorted(set(group_of.values()))}
    for request_id, request in requests.items():
        groups[group_of[request_id]].append(request)
    return groups

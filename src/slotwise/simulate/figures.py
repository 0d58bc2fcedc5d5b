"""The figures of simulated or measured requests: latencies, throughput, goodput and refusals.

    arrived          token   token      token
       │               │       │          │
       ├──── TTFT ─────┼─ ITL ─┼── ITL ───┤        TPOT = (last token − first token) / (tokens − 1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from operator import sub

from slotwise.simulate.simulator import REFUSED, SERVED, SimulatedRequest


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds for goodput; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, request: SimulatedRequest) -> bool:
        times = request.token_times
        if request.reason not in SERVED or not times:
            return False
        tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        return ((self.ttft is None or times[0] - request.arrived <= self.ttft)
                and (self.tpot is None or tpot <= self.tpot))


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
    first = [request.token_times[0] - request.arrived for request in requests if request.token_times]
    gaps: Counter[float] = Counter()
    for request in requests:
        gaps.update(map(sub, request.token_times[1:], request.token_times))
    ends = [max(request.ended, request.arrived) for request in requests]
    seconds = max(ends, default=0.0) - min([request.arrived for request in requests], default=0.0)
    rate = 1 / seconds if seconds > 0 else 0.0
    reasons = Counter(request.reason for request in requests)
    waits = Counter(first)
    return Figures(
        len(requests), sum(reasons[reason] for reason in SERVED), reasons[REFUSED], quantile(waits, 0.5),
        quantile(waits, 0.99), quantile(gaps, 0.5), quantile(gaps, 0.99),
        sum(len(request.token_times) for request in requests) * rate, sum(map(objectives.met, requests)) * rate)


def quantile(counts: Mapping[float, int], share: float) -> float:
    """Returns the smallest value that at least `share` of all values do not exceed; 0 of none."""
    left = ceil(share * sum(counts.values()))
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return 0.0


def grouped(requests: Mapping[str, SimulatedRequest], group_of: Mapping[str, str]) -> dict[str, list[SimulatedRequest]]:
    """Returns the requests by group, in order of the groups' names."""
    groups: dict[str, list[SimulatedRequest]] = {name: [] for name in sorted(set(group_of.values()))}
    for request_id, request in requests.items():
        groups[group_of[request_id]].append(request)
    return groups

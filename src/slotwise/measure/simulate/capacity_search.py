"""Capacity: the fewest replicas that meet an objective, found by simulation, and how sure that is.

More replicas never make latencies longer on the whole, so the number is found by doubling and bisection.  The interval
comes from other traffic of the same kind: blocks of the workload's own gaps and lengths, drawn with replacement (the
moving-blocks bootstrap of Künsch, 1989), which keeps bursts shorter than a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from slotwise.measure.simulate.figures import Figures, LatencyLimits, SimulatedRequest, figures
from slotwise.measure.simulate.simulator import Server, Setup, simulate, traffic_of
from slotwise.measure.workload.distributions import below, stream
from slotwise.measure.workload.workloads import MAX_SECONDS, Workload, WorkRequest

MOST = 1024  # replicas
HOUR = 3600.0  # seconds
LOADS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # of the workload's own rate


class OutOfReach(ValueError):
    """No number of replicas meets an objective."""


@dataclass(frozen=True, slots=True)
class CapacityTarget:
    """Limits in seconds that a share of all requests must keep; None: any.  A refused request keeps none."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.99

    def met(self, requests: Sequence[SimulatedRequest]) -> bool:
        """Whether each limit is kept by this share of the requests."""
        each = [LatencyLimits(ttft=self.ttft), LatencyLimits(tpot=self.tpot)]
        return all(sum(map(one.met, requests)) >= self.share * len(requests) for one in each)


class LoadPoint(NamedTuple):
    """What replicas give at a load."""

    replicas: int
    load: float  # of the workload's own rate
    offered: float  # requests a second
    met: bool
    figures: Figures


def served(workload: Workload, setup: Setup, replicas: int) -> list[SimulatedRequest]:
    servers = [Server(setup, replica=number) for number in range(replicas)]
    return list(simulate(traffic_of(workload, setup.adapters.number), servers).values())


def fewest(workload: Workload, setup: Setup, target: CapacityTarget, start: int = 1) -> int:
    """Returns the fewest replicas that meet `target`.

    Args:
        start: where the search begins.

    Raises:
        OutOfReach: requests that run alone do not meet it, or not even `MOST` replicas do.
    """
    apart = min(HOUR, MAX_SECONDS / len(workload.requests))
    alone = tuple([replace(one, arrives_at=apart * one.number) for one in workload.requests])
    if not target.met(served(replace(workload, requests=alone), setup, 1)):
        raise OutOfReach("no number of replicas meets the objective: requests that run alone miss it")

    def meets(replicas: int) -> bool:
        return target.met(served(workload, setup, replicas))

    enough, too_few = max(1, start), 0
    while not meets(enough):
        too_few, enough = enough, enough * 2
        if enough > MOST:
            raise OutOfReach(f"the objective is not met by {MOST} replicas")
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if meets(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def at_load(workload: Workload, setup: Setup, target: CapacityTarget, replicas: int, load: float = 1.0) -> LoadPoint:
    """Returns what `replicas` give when requests arrive `load` times as fast."""
    requests = served(scaled(workload, load), setup, replicas)
    last = workload.requests[-1].arrives_at or 0.0
    offered = len(workload.requests) / last * load if last else 0.0
    limits = LatencyLimits(target.ttft, target.tpot)
    return LoadPoint(replicas, load, offered, target.met(requests), figures(requests, limits))


def scaled(workload: Workload, load: float) -> Workload:
    """Returns the workload, arriving `load` times as fast."""
    requests = tuple([replace(one, arrives_at=(one.arrives_at or 0.0) / load) for one in workload.requests])
    return replace(workload, requests=requests)


def resampled(workload: Workload, seed: int) -> Workload:
    """Returns as many requests, in blocks of consecutive ones drawn with replacement, with the gaps before them."""
    rng, requests = stream(seed, "bootstrap"), workload.requests
    length = max(1, isqrt(len(requests)))
    times = [one.arrives_at or 0.0 for one in requests]
    gaps = [0.0, *[after - before for before, after in pairwise(times)]]
    drawn: list[WorkRequest] = []
    now = 0.0
    while len(drawn) < len(requests):
        first = below(rng, len(requests) - length + 1)
        for index in range(first, min(first + length, first + len(requests) - len(drawn))):
            now += gaps[index]
            drawn.append(replace(requests[index], number=len(drawn), arrives_at=now))
    return replace(workload, requests=tuple(drawn))


def interval(workload: Workload, setup: Setup, target: CapacityTarget, replicas: int, rounds: int,
             ) -> tuple[int | None, int | None]:
    """Returns the fewest replicas of the 5th and the 95th percentile of `rounds` resampled workloads.

    None where no number suffices: more of the requests that miss the objective alone were drawn.
    """
    found: list[int | None] = []
    for seed in range(rounds):
        try:
            found.append(fewest(resampled(workload, seed), setup, target, replicas))
        except OutOfReach:
            found.append(None)
    found.sort(key=lambda number: MOST + 1 if number is None else number)
    return found[round(0.05 * (rounds - 1))], found[round(0.95 * (rounds - 1))]

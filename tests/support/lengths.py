"""The output lengths of the published table, drawn with the standard library alone."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from slotwise.measure.bench.theory import step_ratio

Draw = Callable[[random.Random], int]
"""Draws one output length, at least 1."""


def uniform(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def exponential(mean: float, cap: int) -> Draw:
    return lambda rng: max(1, min(cap, round(rng.expovariate(1 / mean))))


def lognormal(median: float, sigma: float, cap: int) -> Draw:
    return lambda rng: max(1, min(cap, round(rng.lognormvariate(math.log(median), sigma))))


SLOTS = (4, 8, 16, 32)
FIXED = "fixed 128"
TABLE: dict[str, tuple[Draw, float, tuple[float, ...]]] = {
    FIXED: (lambda rng: 128, 0.0, (1.00, 1.00, 1.00, 1.00)),
    "uniform 100-1024": (uniform(100, 1024), 0.47, (1.49, 1.64, 1.70, 1.74)),
    "uniform 1-128": (uniform(1, 128), 0.57, (1.58, 1.77, 1.84, 1.89)),
    "exponential mean 128, at most 512": (exponential(128, 512), 0.91, (1.99, 2.49, 2.92, 3.23)),
    "log-normal median 128, sigma 1": (lognormal(128, 1.0, 2048), 1.23, (2.18, 2.93, 3.77, 4.50)),
}
"""Decode steps of static over continuous batching at `SLOTS`: how lengths are drawn, their coefficient of variation
and the ratio published for one draw of about a thousand requests."""


def drawn(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [TABLE[name][0](rng) for _ in range(count)]


class Expected(NamedTuple):
    """A ratio over many draws: its mean, and the standard deviation of a single draw around it."""

    mean: float
    deviation: float


def expected_step_ratio(draw: Draw, slots: int, num_requests: int, trials: int, seed: int) -> Expected:
    """Monte Carlo: `step_ratio` of `trials` workloads of `num_requests` lengths each."""
    rng = random.Random(seed)
    ratios = [step_ratio([draw(rng) for _ in range(num_requests)], slots) for _ in range(trials)]
    return Expected(statistics.fmean(ratios), statistics.stdev(ratios))


def longest_over_mean(lengths: Iterable[int], slots: int) -> float:
    """The ratio that `step_ratio` approaches in an endless queue: E[longest of `slots`] / E[length].

    `lengths` stand for their distribution: the i-th of n in order is the longest of a group with probability
    (i/n)^slots - ((i-1)/n)^slots.
    """
    ordered = sorted(lengths)
    count = len(ordered)
    longest = sum(
        length * ((rank / count) ** slots - ((rank - 1) / count) ** slots)
        for rank, length in enumerate(ordered, start=1))
    return longest / statistics.fmean(ordered)


def padded_tokens(prompts: Sequence[int], slots: int) -> int:
    """Prompt tokens wasted when each group of `slots` is padded to its longest prompt."""
    groups = [prompts[first:first + slots] for first in range(0, len(prompts), slots)]
    return sum(max(group) * len(group) - sum(group) for group in groups)

"""The output lengths of the published table, drawn with the standard library alone."""

from __future__ import annotations

import math
import random

from slotwise.bench.theory import Draw


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

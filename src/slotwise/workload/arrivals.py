"""Arrival times in seconds from the start.  The first request arrives at 0, so that no measurement begins idle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Protocol, cast

from slotwise.workload import forms

MAX_RATE = 1e6  # requests per second
MAX_USERS = 100_000
NORMAL = NormalDist()


class Arrivals(Protocol):
    """Times of arrival.  `str()` gives the text that `parse` reads."""

    form: ClassVar[str]

    @property
    def users(self) -> int:
        """Number of users of a closed loop, each of which waits for its answer; 0: an open loop."""
        ...

    def times(self, rng: random.Random, count: int) -> list[float]:
        """Returns `count` times in seconds, in order; empty in a closed loop."""
        ...


def parse(text: str) -> Arrivals:
    """Returns the arrivals that `text` describes; raises ValueError with one line that lists the forms."""
    return cast(Arrivals, forms.parse(text, KINDS, "arrivals"))


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All requests at the start."""

    form: ClassVar[str] = "at-once"
    users: ClassVar[int] = 0

    def __str__(self) -> str:
        return "at-once"

    def times(self, rng: random.Random, count: int) -> list[float]:
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, `rate` per second.  Raises ValueError for a rate out of range."""

    rate: float
    form: ClassVar[str] = "poisson:RATE"
    users: ClassVar[int] = 0

    def __post_init__(self) -> None:
        forms.require_within("a rate of arrivals", self.rate, 1 / MAX_RATE, MAX_RATE)

    def __str__(self) -> str:
        return f"poisson:{forms.written(self.rate)}"

    def times(self, rng: random.Random, count: int) -> list[float]:
        return _sums([-math.log(forms.share(rng)) / self.rate for _ in range(count - 1)], count)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps, `rate` arrivals per second.  `cv`, the gaps' deviation over their mean, is above 1 for
    bursty arrivals, and 1 for Poisson's.  Other tools call the shape 1/cv² burstiness.

    Raises:
        ValueError: a number out of range.
    """

    rate: float
    cv: float
    form: ClassVar[str] = "gamma:RATE:CV"
    users: ClassVar[int] = 0

    def __post_init__(self) -> None:
        forms.require_within("a rate of arrivals", self.rate, 1 / MAX_RATE, MAX_RATE)
        forms.require_within("cv", self.cv, 0.01, 100)

    def __str__(self) -> str:
        return f"gamma:{forms.written(self.rate)}:{forms.written(self.cv)}"

    def times(self, rng: random.Random, count: int) -> list[float]:
        shape = self.cv**-2
        return _sums([gamma(rng, shape) / (shape * self.rate) for _ in range(count - 1)], count)


@dataclass(frozen=True, slots=True)
class Closed:
    """Users that each send the next request when the last is answered.  Raises ValueError for a number out of range."""

    users: int
    form: ClassVar[str] = "closed:USERS"

    def __post_init__(self) -> None:
        forms.require_within("the number of users", self.users, 1, MAX_USERS)

    def __str__(self) -> str:
        return f"closed:{self.users}"

    def times(self, rng: random.Random, count: int) -> list[float]:
        return []


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """The recorded arrival times of a trace."""

    form: ClassVar[str] = "trace"
    users: ClassVar[int] = 0

    def __str__(self) -> str:
        return "trace"

    def times(self, rng: random.Random, count: int) -> list[float]:
        """Raises ValueError: the times are in the trace."""
        raise ValueError("arrivals: 'trace' needs a trace")


KINDS: dict[str, type[Arrivals]] = {
    "at-once": AtOnce, "poisson": Poisson, "gamma": Gamma, "closed": Closed, "trace": TraceTimes,
}


def gamma(rng: random.Random, shape: float) -> float:
    """Returns a gamma variate of the given shape and scale 1 (Marsaglia and Tsang, ACM TOMS 26(3), 2000)."""
    if shape < 1:
        return gamma(rng, shape + 1) * math.pow(forms.share(rng), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = NORMAL.inv_cdf(forms.share(rng))
        v = (1 + c * x) ** 3
        if v > 0 and math.log(forms.share(rng)) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v


def _sums(gaps: list[float], count: int) -> list[float]:
    """Returns `count` times from the gaps between them."""
    times = [0.0] * count
    for number, gap in enumerate(gaps, start=1):
        times[number] = times[number - 1] + gap
    return times

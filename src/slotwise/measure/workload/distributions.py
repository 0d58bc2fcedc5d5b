"""What a workload is drawn from: lengths, times of arrival and shared prefixes, each with its text form.

A text form is a name and its numbers, `name:number:number`; each of `LENGTH_KINDS` and `ARRIVAL_KINDS` is one dataclass
whose fields are the numbers.  Lengths in tokens are drawn by inverting their cumulative function.  Times of arrival are
seconds from the start; the first request arrives at 0, so that no measurement begins idle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import NormalDist
from typing import Any, ClassVar, Protocol, cast

SMALLEST_SHARE = 2.0**-53  # the step between the values of `random()`
_NUMBERS = {"int": int, "float": float}
MAX_LENGTH = 1_000_000  # tokens of a prompt or an output
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
AZURE_PROMPT = (2, 181, 396, 1020, 1189, 2735, 4083, 4142, 14050)
AZURE_OUTPUT = (7, 41, 85, 129, 395, 424, 451, 601, 1000)
"""Quantiles of the 19,366 chat requests of one hour in the Azure LLM inference trace of November 2023 (Azure Public
Dataset, CC-BY-4.0), published with Splitwise (Patel et al., ISCA 2024)."""
MAX_RATE = 1e6  # requests per second
MAX_USERS = 100_000
MAX_GROUPS = 100_000
NO_GROUP = -1


def parse_form(text: str, kinds: Mapping[str, type[Any]], what: str) -> Any:
    """Returns the object that `text` describes.

    Args:
        kinds: the dataclasses by name; the `form` of each shows its syntax.
        what: the setting's name, for the error.

    Raises:
        ValueError: one line that lists the forms, or says which number is out of range.
    """
    name, *numbers = text.strip().split(":")
    kind = kinds.get(name)
    known = ", ".join(kind.form for kind in kinds.values())
    if kind is None:
        raise ValueError(f"{what}: there is no {text!r}; there are {known}")
    types = [_NUMBERS[str(field.type)] for field in fields(kind)]
    try:
        values = [convert(number) for convert, number in zip(types, numbers, strict=True)]
    except ValueError:
        raise ValueError(f"{what}: {text!r} does not read as {kind.form}; there are {known}") from None
    return kind(*values)


def written(number: float) -> str:
    """Returns a number as text; whole numbers have no decimal point."""
    return str(int(number)) if number == int(number) else repr(number)


def require_within(name: str, value: float, lowest: float, highest: float) -> None:
    """Raises ValueError for NaN or a number out of range."""
    if not lowest <= value <= highest:
        raise ValueError(f"{name} must be between {written(lowest)} and {written(highest)}, not {value}")


def share(rng: random.Random) -> float:
    """Returns a number strictly between 0 and 1."""
    return max(rng.random(), SMALLEST_SHARE)


def below(rng: random.Random, count: int) -> int:
    """Returns an integer from 0 to `count` - 1, uniformly distributed."""
    return int(rng.random() * count)


def stream(seed: int, purpose: str) -> random.Random:
    """Returns the random stream of one purpose, so that changing one part of a workload leaves the others unchanged."""
    return random.Random(f"slotwise {seed} {purpose}")


NORMAL = NormalDist()


# -- lengths -----------------------------------------------------------------------------------------------------------


class LengthDistribution(Protocol):
    """A distribution of lengths.  `str()` gives the text that `parse` reads."""

    form: ClassVar[str]

    @property
    def longest(self) -> int:
        """Upper bound of all draws, in tokens."""
        ...

    def draw(self, rng: random.Random) -> int:
        """Returns a length in tokens, at least 1."""
        ...


def parse_lengths(text: str) -> LengthDistribution:
    """Returns the distribution that `text` describes; raises ValueError with one line that lists the forms."""
    return cast(LengthDistribution, parse_form(text, LENGTH_KINDS, "lengths"))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant length.  Raises ValueError for a length out of range."""

    tokens: int
    form: ClassVar[str] = "fixed:TOKENS"

    def __post_init__(self) -> None:
        require_within("a length", self.tokens, 1, MAX_LENGTH)

    def __str__(self) -> str:
        return f"fixed:{self.tokens}"

    @property
    def longest(self) -> int:
        return self.tokens

    def draw(self, rng: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from `low` to `high`, both included.  Raises ValueError for lengths out of range."""

    low: int
    high: int
    form: ClassVar[str] = "uniform:LOW:HIGH"

    def __post_init__(self) -> None:
        require_within("a length", self.low, 1, MAX_LENGTH)
        require_within("the longest length", self.high, self.low, MAX_LENGTH)

    def __str__(self) -> str:
        return f"uniform:{self.low}:{self.high}"

    @property
    def longest(self) -> int:
        return self.high

    def draw(self, rng: random.Random) -> int:
        return self.low + below(rng, self.high - self.low + 1)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with `mean`, then clipped at `cap`.  Raises ValueError for numbers out of range."""

    mean: float
    cap: int
    form: ClassVar[str] = "exponential:MEAN:CAP"

    def __post_init__(self) -> None:
        require_within("a mean length", self.mean, 1, MAX_LENGTH)
        require_within("a cap", self.cap, 1, MAX_LENGTH)

    def __str__(self) -> str:
        return f"exponential:{written(self.mean)}:{self.cap}"

    @property
    def longest(self) -> int:
        return self.cap

    def draw(self, rng: random.Random) -> int:
        return _whole(-self.mean * math.log(share(rng)), self.cap)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with `median`, clipped at `cap`; `sigma` is the deviation of the logarithm.

    Raises:
        ValueError: a number out of range.
    """

    median: float
    sigma: float
    cap: int
    form: ClassVar[str] = "lognormal:MEDIAN:SIGMA:CAP"

    def __post_init__(self) -> None:
        require_within("a median length", self.median, 1, MAX_LENGTH)
        require_within("sigma", self.sigma, 0, 10)
        require_within("a cap", self.cap, 1, MAX_LENGTH)

    def __str__(self) -> str:
        return f"lognormal:{written(self.median)}:{self.sigma!r}:{self.cap}"

    @property
    def longest(self) -> int:
        return self.cap

    def draw(self, rng: random.Random) -> int:
        return _whole(self.median * math.exp(self.sigma * NORMAL.inv_cdf(share(rng))), self.cap)


@dataclass(frozen=True, slots=True)
class _Azure:
    """Lengths of the Azure conversation trace, times `scale`.  Raises ValueError for a scale out of range."""

    scale: float
    form: ClassVar[str]
    values: ClassVar[tuple[int, ...]]

    def __post_init__(self) -> None:
        require_within("a scale of lengths", self.scale, 1e-4, 10)

    def __str__(self) -> str:
        return self.form.replace("SCALE", repr(self.scale))

    @property
    def longest(self) -> int:
        return _whole(self.values[-1] * self.scale, MAX_LENGTH)

    def draw(self, rng: random.Random) -> int:
        return _whole(quantile(self.values, rng.random()) * self.scale, MAX_LENGTH)


class AzurePrompt(_Azure):
    form = "azure-prompt:SCALE"
    values = AZURE_PROMPT


class AzureOutput(_Azure):
    form = "azure-output:SCALE"
    values = AZURE_OUTPUT


LENGTH_KINDS: dict[str, type[LengthDistribution]] = {
    "fixed": Fixed, "uniform": Uniform, "exponential": Exponential, "lognormal": LogNormal,
    "azure-prompt": AzurePrompt, "azure-output": AzureOutput,
}


def quantile(values: tuple[int, ...], share: float) -> float:
    """Returns the quantile at `share`, interpolated linearly between `QUANTILES`."""
    for (low, high), (smaller, larger) in zip(pairwise(QUANTILES), pairwise(values), strict=True):
        if share <= high:
            return smaller + (larger - smaller) * (share - low) / (high - low)
    raise ValueError(f"a share must be between 0 and 1, not {share}")


def _whole(length: float, cap: int) -> int:
    return max(1, round(min(length, cap)))


# -- arrivals ----------------------------------------------------------------------------------------------------------


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


def parse_arrivals(text: str) -> Arrivals:
    """Returns the arrivals that `text` describes; raises ValueError with one line that lists the forms."""
    return cast(Arrivals, parse_form(text, ARRIVAL_KINDS, "arrivals"))


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
        require_within("a rate of arrivals", self.rate, 1 / MAX_RATE, MAX_RATE)

    def __str__(self) -> str:
        return f"poisson:{written(self.rate)}"

    def times(self, rng: random.Random, count: int) -> list[float]:
        return _sums([-math.log(share(rng)) / self.rate for _ in range(count - 1)], count)


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
        require_within("a rate of arrivals", self.rate, 1 / MAX_RATE, MAX_RATE)
        require_within("cv", self.cv, 0.01, 100)

    def __str__(self) -> str:
        return f"gamma:{written(self.rate)}:{written(self.cv)}"

    def times(self, rng: random.Random, count: int) -> list[float]:
        shape = self.cv**-2
        return _sums([gamma(rng, shape) / (shape * self.rate) for _ in range(count - 1)], count)


@dataclass(frozen=True, slots=True)
class Closed:
    """Users that each send the next request when the last is answered.  Raises ValueError for a number out of range."""

    users: int
    form: ClassVar[str] = "closed:USERS"

    def __post_init__(self) -> None:
        require_within("the number of users", self.users, 1, MAX_USERS)

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


ARRIVAL_KINDS: dict[str, type[Arrivals]] = {
    "at-once": AtOnce, "poisson": Poisson, "gamma": Gamma, "closed": Closed, "trace": TraceTimes,
}


def gamma(rng: random.Random, shape: float) -> float:
    """Returns a gamma variate of the given shape and scale 1 (Marsaglia and Tsang, ACM TOMS 26(3), 2000)."""
    if shape < 1:
        return gamma(rng, shape + 1) * math.pow(share(rng), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = NORMAL.inv_cdf(share(rng))
        v = (1 + c * x) ** 3
        if v > 0 and math.log(share(rng)) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v


def _sums(gaps: list[float], count: int) -> list[float]:
    """Returns `count` times from the gaps between them."""
    times = [0.0] * count
    for number, gap in enumerate(gaps, start=1):
        times[number] = times[number - 1] + gap
    return times


# -- shared prefixes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`groups` prefixes of `tokens` each, put before the drawn prompts.  0 and 0: none.

    Raises:
        ValueError: a number out of range, or groups without tokens.
    """

    groups: int = 0
    tokens: int = 0
    form: ClassVar[str] = "GROUPS:TOKENS"

    def __post_init__(self) -> None:
        require_within("groups of prefixes", self.groups, 0, MAX_GROUPS)
        require_within("tokens of a prefix", self.tokens, 0, MAX_LENGTH)
        if (self.groups == 0) != (self.tokens == 0):
            raise ValueError("a prefix needs both groups and tokens: GROUPS:TOKENS")

    def __str__(self) -> str:
        return f"{self.groups}:{self.tokens}"

    def draw(self, rng: random.Random) -> int:
        """Returns a uniformly drawn group; -1 when there are none."""
        return below(rng, self.groups) if self.groups else NO_GROUP


def parse_prefixes(text: str) -> Prefixes:
    """Returns the prefixes that `text` describes; raises ValueError with one line that shows the form."""
    return cast(Prefixes, parse_form(f"prefix:{text}", {"prefix": Prefixes}, "prefix"))

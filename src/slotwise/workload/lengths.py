"""Distributions of prompt and output lengths in tokens, drawn by inverting their cumulative function."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import ClassVar, Protocol, cast

from slotwise.workload import forms

MAX_LENGTH = 1_000_000  # tokens of a prompt or an output
NORMAL = NormalDist()

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
AZURE_PROMPT = (2, 181, 396, 1020, 1189, 2735, 4083, 4142, 14050)
AZURE_OUTPUT = (7, 41, 85, 129, 395, 424, 451, 601, 1000)
"""Quantiles of the 19,366 chat requests of one hour in the Azure LLM inference trace of November 2023 (Azure Public
Dataset, CC-BY-4.0), published with Splitwise (Patel et al., ISCA 2024)."""


class Lengths(Protocol):
    """A distribution of lengths.  `str()` gives the text that `parse` reads."""

    form: ClassVar[str]

    @property
    def longest(self) -> int:
        """Upper bound of all draws, in tokens."""
        ...

    def draw(self, rng: random.Random) -> int:
        """Returns a length in tokens, at least 1."""
        ...


def parse(text: str) -> Lengths:
    """Returns the distribution that `text` describes; raises ValueError with one line that lists the forms."""
    return cast(Lengths, forms.parse(text, KINDS, "lengths"))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant length.  Raises ValueError for a length out of range."""

    tokens: int
    form: ClassVar[str] = "fixed:TOKENS"

    def __post_init__(self) -> None:
        forms.require_within("a length", self.tokens, 1, MAX_LENGTH)

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
        forms.require_within("a length", self.low, 1, MAX_LENGTH)
        forms.require_within("the longest length", self.high, self.low, MAX_LENGTH)

    def __str__(self) -> str:
        return f"uniform:{self.low}:{self.high}"

    @property
    def longest(self) -> int:
        return self.high

    def draw(self, rng: random.Random) -> int:
        return self.low + forms.below(rng, self.high - self.low + 1)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with `mean`, then clipped at `cap`.  Raises ValueError for numbers out of range."""

    mean: float
    cap: int
    form: ClassVar[str] = "exponential:MEAN:CAP"

    def __post_init__(self) -> None:
        forms.require_within("a mean length", self.mean, 1, MAX_LENGTH)
        forms.require_within("a cap", self.cap, 1, MAX_LENGTH)

    def __str__(self) -> str:
        return f"exponential:{forms.written(self.mean)}:{self.cap}"

    @property
    def longest(self) -> int:
        return self.cap

    def draw(self, rng: random.Random) -> int:
        return _whole(-self.mean * math.log(forms.share(rng)), self.cap)


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
        forms.require_within("a median length", self.median, 1, MAX_LENGTH)
        forms.require_within("sigma", self.sigma, 0, 10)
        forms.require_within("a cap", self.cap, 1, MAX_LENGTH)

    def __str__(self) -> str:
        return f"lognormal:{forms.written(self.median)}:{self.sigma!r}:{self.cap}"

    @property
    def longest(self) -> int:
        return self.cap

    def draw(self, rng: random.Random) -> int:
        return _whole(self.median * math.exp(self.sigma * NORMAL.inv_cdf(forms.share(rng))), self.cap)


@dataclass(frozen=True, slots=True)
class _Azure:
    """Lengths of the Azure conversation trace, times `scale`.  Raises ValueError for a scale out of range."""

    scale: float
    form: ClassVar[str]
    values: ClassVar[tuple[int, ...]]

    def __post_init__(self) -> None:
        forms.require_within("a scale of lengths", self.scale, 1e-4, 10)

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


KINDS: dict[str, type[Lengths]] = {
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

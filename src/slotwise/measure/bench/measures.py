"""Computes a run's figures from the times of its tokens.  Field names are those of `vllm bench serve`.

    due  sent      token  token    token  end of stream
     │    │          │      │        │        │
     ·────├── TTFT ──┼─ITL ─┼── ITL ─┤        │
     late ├──────────── E2E ─────────┴────────┤      TPOT = (E2E − TTFT) / (tokens − 1)

A server may send several tokens in one event: ITL is the gap between events that carry text, TPOT that per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

MS = 1000.0  # milliseconds in a second
PERCENTILES = {"median": 50.0, "p90": 90.0, "p99": 99.0}

COMPLETED = "completed"
REJECTED = "rejected"  # refused by the server: a status of 4xx or 503
FAILED = "failed"  # no answer, an answer of another kind, or a stream that broke
UNFINISHED = "unfinished"  # in progress when the run was interrupted


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request, filled while its answer arrives.  Times are seconds since the run began."""

    number: int
    status: str = UNFINISHED
    due: float = 0.0  # when it should have been sent
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of events that carried a token, with text or without
    ended: float = 0.0  # the last event of the answer
    num_prompt: int = 0  # tokens, by the server's count
    num_output: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first token; to the end, if there was none."""
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 when there is none."""
        return (self.e2el - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


MEASURES: dict[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft, "tpot": lambda outcome: outcome.tpot, "e2el": lambda outcome: outcome.e2el}


@dataclass(frozen=True, slots=True)
class GoodputLimits:
    """Limits in milliseconds for goodput, by measure; empty: no goodput."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, words: Iterable[str]) -> GoodputLimits:
        """Parse words such as `ttft:500`.  Raises ValueError with one line that says what is allowed."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = math.nan
            if name not in MEASURES or not 0 < limit < math.inf:
                raise ValueError(f"goodput: {word!r} is none of {', '.join(f'{name}:MS' for name in MEASURES)}")
            if name in limits:
                raise ValueError(f"goodput: {name} is given twice")
            limits[name] = limit
        return cls(limits)

    def met(self, outcome: RequestOutcome) -> bool:
        return all(MEASURES[name](outcome) * MS <= limit for name, limit in self.limits.items())


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the two nearest ranks; 0 of no values."""
    return float(np.percentile(values, percent)) if len(values) else 0.0


def summary(values: Iterable[float]) -> dict[str, float]:
    """`mean`, `p50`, `p90`, `p99` and `max` of values in any order; all 0 of none."""
    found = np.array([*values] or [0.0])
    p50, p90, p99 = np.percentile(found, (50, 90, 99)).tolist()
    return {"mean": float(found.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(found.max())}


def serving_metrics(outcomes: Sequence[RequestOutcome], duration: float, objectives: GoodputLimits) -> dict[str, Any]:
    """The figures of a run of `duration` seconds.  Throughput and latencies are those of completed requests.

    `max_itl` is each request's longest gap; `request_goodput` is null without objectives.
    """
    done = [outcome for outcome in outcomes if outcome.status == COMPLETED]
    num_input = sum(outcome.num_prompt for outcome in done)
    num_output = sum(outcome.num_output for outcome in done)
    num_good = sum(map(objectives.met, done))
    return {
        "duration": duration,
        **{status: sum(outcome.status == status for outcome in outcomes)
           for status in (COMPLETED, REJECTED, FAILED, UNFINISHED)},
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": _rate(len(done), duration),
        "request_goodput": _rate(num_good, duration) if objectives.limits else None,
        "output_throughput": _rate(num_output, duration),
        "total_token_throughput": _rate(num_input + num_output, duration),
        "max_concurrent_requests": most_at_once((outcome.sent, outcome.ended) for outcome in done),
        "max_late_ms": max((outcome.sent - outcome.due for outcome in done), default=0.0) * MS,
        **latencies("ttft", [outcome.ttft for outcome in done]),
        **latencies("tpot", [outcome.tpot for outcome in done if outcome.num_output > 1]),
        **latencies("itl", [gap for outcome in done for gap in outcome.itls]),
        **latencies("max_itl", [max(outcome.itls) for outcome in done if len(outcome.token_times) > 1]),
        **latencies("e2el", [outcome.e2el for outcome in done]),
    }


def samples(outcomes: Iterable[RequestOutcome]) -> dict[str, list[Any]]:
    """The measurements of each request, in the workload's order; seconds."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.number)
    return {
        "input_lens": [outcome.num_prompt for outcome in ordered],
        "output_lens": [outcome.num_output for outcome in ordered],
        "start_times": [outcome.sent for outcome in ordered],
        "ttfts": [outcome.ttft if outcome.status == COMPLETED else 0.0 for outcome in ordered],
        "itls": [outcome.itls for outcome in ordered],
        "e2els": [outcome.e2el if outcome.status == COMPLETED else 0.0 for outcome in ordered],
        "statuses": [outcome.status for outcome in ordered],
        "errors": [outcome.error for outcome in ordered],
    }


def latencies(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds, each under its field's name."""
    found = np.array(seconds or [0.0]) * MS
    return {
        f"mean_{name}_ms": float(found.mean()), f"std_{name}_ms": float(found.std()),
        **{f"{word}_{name}_ms": float(np.percentile(found, percent)) for word, percent in PERCENTILES.items()}}


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The most spans (start, end) that overlap; one that ends as another starts does not overlap it."""
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0

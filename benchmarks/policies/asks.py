"""Workloads: the Azure conversation trace, scaled, and bursty arrivals of log-normal lengths."""

from __future__ import annotations

import random
from pathlib import Path

from slotwise.workload.distributions import AzureOutput, AzurePrompt, Gamma, LogNormal, Poisson
from slotwise.workload.trace import Trace, read_trace

from .worlds import Ask

SCALE = 1 / 8  # of the trace's lengths, for a small machine
MAX_PROMPT, MAX_OUTPUT = 700, 300


def azure(path: Path | None, count: int, rate: float, seed: int) -> list[Ask]:
    """Returns requests of the trace with its bursts, `rate` per second on average; without a file, of its quantiles."""
    if path is None:
        inputs, outputs = AzurePrompt(SCALE), AzureOutput(SCALE)
        drawn = random.Random(seed)
        times = Poisson(rate).times(drawn, count)
        return [Ask(at, _cut(inputs.draw(drawn), MAX_PROMPT), outputs.draw(drawn)) for at in times]
    trace = read_trace(path, SCALE, limit=count)
    return [Ask(at, _cut(prompt, MAX_PROMPT), _cut(output, MAX_OUTPUT))
            for at, (prompt, output) in zip(_paced(trace, rate), trace.lengths, strict=True)]


def _paced(trace: Trace, rate: float) -> list[float]:
    """Returns the trace's times, scaled to `rate` requests per second."""
    scale = len(trace.times) / rate / max(trace.times[-1], 1e-9)
    return [at * scale for at in trace.times]


def bursty(count: int, rate: float, seed: int, sigma: float = 1.0) -> list[Ask]:
    """Returns requests with gamma-distributed gaps (coefficient of variation 3) and independent lengths."""
    drawn = random.Random(seed)
    times = Gamma(rate, 3.0).times(drawn, count)
    inputs, outputs = LogNormal(64, sigma, MAX_PROMPT), LogNormal(24, sigma, MAX_OUTPUT)
    return [Ask(at, inputs.draw(drawn), outputs.draw(drawn)) for at in times]


def _cut(length: int, most: int) -> int:
    return max(1, min(length, most))

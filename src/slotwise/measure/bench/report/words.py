"""Numbers and comparisons as text: three significant digits, units, whole sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from slotwise.measure.bench.report.data import ClientFigures, DisciplineRun, Result

NONE = "–"
FIT_MISS = 0.3  # error, as a share of the measured decode time, from which the line of step times explains nothing


def figure(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits: 0.0456, 1.70, 12.3, 1,230, 4.57 M."""
    if value is None:
        return NONE
    if abs(value) >= 1e6:
        scale, letter = (1e6, "M") if abs(value) < 1e9 else (1e9, "G")
        return f"{figure(value / scale, digits)} {letter}"
    if value == 0 or abs(value) < 1e-12:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def count(value: float | None) -> str:
    """A number of things, all its digits."""
    return NONE if value is None else f"{round(value):,}"


def seconds(value: float | None, digits: int = 3) -> str:
    """A duration with a suitable unit: 412 µs, 31.0 ms, 1.23 s, 4.10 min."""
    if value is None:
        return NONE
    if value == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if abs(float(f"{value:.{digits - 1}e}")) < limit:
            return f"{figure(value * factor, digits)} {unit}"
    return f"{figure(value / 3600, digits)} h"


def share(value: float | None) -> str:
    """A share of one as a percentage: <0.1%, 3.4%, 91%."""
    if value is None:
        return NONE
    percent = value * 100
    if percent == 0 or percent >= 10:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"


def tick(value: float) -> str:
    """The label of a tick, without trailing zeros."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g} M"
    return f"{value:,.10g}"


def tick_seconds(value: float) -> str:
    if value == 0:
        return "0"
    factor, unit = (1e6, "µs") if value < 1e-3 else (1e3, "ms") if value < 1 else (1.0, "s")
    return f"{value * factor:,.6g} {unit}"


def tick_share(value: float) -> str:
    return f"{value * 100:.10g}%"


def times(value: float | None) -> str:
    """A factor: 0.92×, 2.34×, 31.2×."""
    return NONE if value is None else f"{figure(value, 3 if value >= 1 else 2)}×"


def moment(text: str) -> str:
    """A time in ISO 8601 to the minute; any other text unchanged."""
    try:
        return datetime.fromisoformat(text).strftime("%-d %B %Y, %H:%M %Z").strip()
    except ValueError:
        return text


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def gains(run: DisciplineRun, base: DisciplineRun, read: Callable[[ClientFigures], float | None]) -> list[float]:
    """The measure over that of `base`, in each round that has both."""
    found = (ratio(read(ours), read(theirs)) for ours, theirs in zip(run.rounds, base.rounds, strict=False))
    return [gain for gain in found if gain is not None]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def span(values: Sequence[float], write: Callable[[float | None], str]) -> str:
    """The least and the greatest of several values: 464–471 ms; empty where they are one or read the same."""
    low, high = (write(least(values)) if len(values) > 1 else "" for least in (min, max))
    if low == high:
        return ""
    unit = high.lstrip("0123456789.,")
    return f"{low.removesuffix(unit)}–{high}" if low.endswith(unit) else f"{low} – {high}"


def reference(runs: tuple[DisciplineRun, ...]) -> DisciplineRun:
    """The run that others are compared with: static batching, else the slowest."""
    named = [run for run in runs if run.name == "static"]
    return named[0] if named else min(runs, key=lambda run: run.output_throughput or 0.0)


def subject(runs: tuple[DisciplineRun, ...]) -> DisciplineRun:
    """The run of the headline: continuous batching, else the fastest."""
    named = [run for run in runs if run.name == "continuous"]
    return named[0] if named else max(runs, key=lambda run: run.output_throughput or 0.0)


def batching(run: DisciplineRun) -> str:
    """A run's name within a sentence."""
    plain = ("continuous", "static", "dynamic", "orca")
    if run.label.lower() in plain:
        return f"{'Orca' if run.label.lower() == 'orca' else run.label.lower()} batching"
    return run.label


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def headline(result: Result) -> tuple[str, str]:
    """The headline in two parts: the subject, and the finding."""
    if not result.runs:
        return "No run was measured", "the comparison ended before its first discipline did"
    best, base = subject(result.runs), reference(result.runs)
    who = capital(batching(best))
    if best is base:
        parts = [f"{figure(best.output_throughput)} tokens per second"] if best.output_throughput else []
        parts += [f"first token after {seconds(best.ttft.p50)}"] if best.ttft.p50 is not None else []
        return who, listed(parts) or "nothing to compare with"
    return who, ", ".join(filter(None, (_faster(best, base), _sooner(best, base)))) or "no figures"


def _faster(best: DisciplineRun, base: DisciplineRun) -> str:
    gain = median(faster(best, base))
    return f"{figure(gain, 2)}× the tokens per second of {base.label}" if gain else ""


def faster(best: DisciplineRun, base: DisciplineRun) -> list[float]:
    """Of each round: output tokens per second, over those of `base`."""
    return gains(best, base, lambda seen: seen.output_throughput)


def sooner(best: DisciplineRun, base: DisciplineRun) -> list[float]:
    """Of each round: the median time to the first token of `base`, over that of `best`."""
    return gains(base, best, lambda seen: seen.ttft.p50)


def _sooner(best: DisciplineRun, base: DisciplineRun) -> str:
    gain = median(sooner(best, base))
    if not gain:
        return ""
    if 0.995 < gain < 1.005:
        return "the first token at the same time"
    return f"first token {figure(gain, 2)}× sooner" if gain > 1 else f"first token {figure(1 / gain, 2)}× later"


def conditions(result: Result) -> str:
    """The conditions shared by all runs."""
    number = result.workload.num_requests
    requests = f"the same {number:,} requests" if number else "the same requests"
    if len(result.runs) < 2:
        return f"One discipline on {requests.replace('the same ', '')}: run others as well to compare."
    where = "as clients of one server" if result.mode == "server" else "in one process"
    return f"On the same kernels and {requests}, {where}, one after another.{_rounds(result)}"


def _rounds(result: Result) -> str:
    """How often each discipline ran, and the ranges of the headline's figures."""
    best, base = subject(result.runs), reference(result.runs)
    number = max(len(run.rounds) for run in result.runs)
    if number < 2:
        return ""
    spans = ((span(faster(best, base), times), "in tokens per second"),
             (span(sooner(best, base), times), "in time to the first token"))
    gains = listed(f"{found} {measure}" for found, measure in spans if found)
    return f" Each ran in {number} rounds, in turn; figures are medians." + f" The gain was {gains}." * bool(gains)


def fit_warning(runs: Iterable[DisciplineRun]) -> str:
    """A sentence about the runs whose decode time the line of step times misses by `FIT_MISS` or more; else empty."""
    missed = [f"{abs(error):.0%} {'over' if error > 0 else 'under'} the decode time of {run.label}" for run in runs
              if run.step_time and (error := run.step_time.error) is not None and abs(error) >= FIT_MISS]
    return f"The step-time fit misses: {listed(missed)}. Was the machine busy?" if missed else ""


def listed(parts: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = [*parts] or [""]
    return f"{', '.join(first)} and {last}" if first else last

"""The result of a comparison as typed values.

A result is JSON written by `slotwise compare` (version 1); it may be incomplete, from an interrupted run, or come from
a file.  So the reader is lenient: what is missing, null or not finite becomes None or an empty sequence, and the
pictures show "–".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """`steps` consecutive steps of one request in one slot, all of one kind."""

    slot: int
    first: int
    steps: int
    kind: str  # prefill, decode, held; idle where a request keeps its slot and is not computed
    request: int
    tokens: float

    @property
    def end(self) -> int:
        return self.first + self.steps


class Pad(NamedTuple):
    slot: int
    step: int
    tokens: float


@dataclass(frozen=True)
class Spread:
    """One latency over all requests, in seconds; `values` are sorted samples for its distribution."""

    p50: float | None
    p99: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class Lanes:
    """The request of every slot at every step.  `ends` has one number more than there are steps, in seconds."""

    slots: int
    steps: int
    ends: tuple[float, ...]
    pieces: tuple[Piece, ...]
    pads: tuple[Pad, ...]
    truncated: bool


@dataclass(frozen=True)
class Waste:
    padded_tokens: float | None
    held_row_steps: float | None
    empty_slot_steps: float | None
    head_of_line_seconds: float | None
    reserved_unused: float | None


@dataclass(frozen=True)
class Run:
    index: int
    name: str
    label: str
    slots: int
    seconds: float | None
    steps: float | None
    output_tokens: float | None
    output_throughput: float | None
    occupancy: float | None
    mean_rows: float | None
    max_rows: float | None
    preemptions: float | None
    cost_per_million: float | None
    ttft: Spread
    itl: Spread
    e2e: Spread
    waste: Waste
    step_time: tuple[float, float, float | None] | None  # a, b in seconds, and the relative error of the fit
    lanes: Lanes
    cumulative: tuple[tuple[float, float], ...]

    @property
    def whole(self) -> bool:
        """Whether answers came at once, so that there was no time between their tokens."""
        return self.ttft.p50 is not None and not self.itl.p50 and not self.itl.p99


@dataclass(frozen=True)
class Series:
    label: str
    points: tuple[tuple[float, float], ...]
    theory: bool


@dataclass(frozen=True)
class Sweep:
    title: str
    x_label: str
    x_log: bool
    y_label: str
    y_log: bool
    series: tuple[Series, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    model: str
    dtype: str
    mode: str
    seed: str
    environment: Mapping[str, str]
    description: Mapping[str, str]
    requests: int | None
    prompt_tokens: float | None
    identical: bool | None
    interrupted: bool
    runs: tuple[Run, ...]
    sweeps: tuple[Sweep, ...]


def read(result: Mapping[str, Any]) -> Result:
    workload = _mapping(result, "workload")
    requests = number(workload.get("num_requests"))
    identical = result.get("identical_tokens")
    return Result(
        model=_text(result, "model"), dtype=_text(result, "dtype"), mode=_text(result, "mode"),
        seed=_text(result, "seed"), environment=_texts(_mapping(result, "environment")),
        description=_texts(_mapping(workload, "description")), requests=None if requests is None else int(requests),
        prompt_tokens=number(workload.get("prompt_tokens")),
        identical=identical if isinstance(identical, bool) else None,
        interrupted=result.get("interrupted") is True,
        runs=tuple(_run(index, run) for index, run in enumerate(_items(result, "runs"))),
        sweeps=tuple(_sweep(sweep) for sweep in _items(result, "sweeps")))


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _run(index: int, run: Mapping[str, Any]) -> Run:
    name = _text(run, "name") or f"run {index + 1}"
    waste = _mapping(run, "waste")
    plain = ("seconds", "steps", "output_tokens", "output_throughput", "occupancy", "mean_rows", "max_rows",
             "preemptions", "cost_per_million")
    return Run(
        index=index, name=name, label=(_text(run, "label") or name).replace("_", " "),
        slots=int(number(run.get("num_slots")) or 0), **{key: number(run.get(key)) for key in plain},
        **{key: _spread(run, key) for key in ("ttft", "itl", "e2e")},
        waste=Waste(**{key: number(waste.get(key)) for key in Waste.__dataclass_fields__}),
        step_time=_step_time(_mapping(run, "step_time")), lanes=_lanes(_mapping(run, "chart")),
        cumulative=_points(run, "cumulative"))


def _spread(run: Mapping[str, Any], name: str) -> Spread:
    summary = _mapping(run, name)
    values = (number(value) for value in _items(run, f"{name}_values"))
    return Spread(number(summary.get("p50")), number(summary.get("p99")),
                  tuple(sorted(value for value in values if value is not None)))


def _step_time(fit: Mapping[str, Any]) -> tuple[float, float, float | None] | None:
    fixed, per_row = number(fit.get("a")), number(fit.get("b"))
    return None if fixed is None or per_row is None else (fixed, per_row, number(fit.get("error")))


def _lanes(chart: Mapping[str, Any]) -> Lanes:
    slots, steps = (int(number(chart.get(key)) or 0) for key in ("slots", "steps"))
    ends = tuple(number(end) for end in _items(chart, "step_ends"))
    if len(ends) != steps + 1 or None in ends or any(end < start for start, end in pairwise(ends)):
        slots, steps, ends = 0, 0, (0.0,)  # a chart with invalid times is not drawn
    pieces = tuple(sorted(Piece(*piece) for piece in _items(chart, "runs")
                          if 0 <= piece[0] < slots and piece[2] > 0 and 0 <= piece[1] <= steps - piece[2]))
    pads = tuple(Pad(*pad) for pad in _items(chart, "pads")
                 if 0 <= pad[0] < slots and 0 <= pad[1] < steps and pad[2] > 0)
    return Lanes(slots, steps, ends, pieces, pads, bool(chart.get("truncated")))


def _sweep(sweep: Mapping[str, Any]) -> Sweep:
    x, y = _mapping(sweep, "x"), _mapping(sweep, "y")
    series = tuple(
        Series(_text(one, "label"), tuple(sorted(_points(one, "points"))), one.get("style") == "theory")
        for one in _items(sweep, "series"))
    return Sweep(_text(sweep, "title") or _text(sweep, "name"), _text(x, "label"), bool(x.get("log")),
                 _text(y, "label"), bool(y.get("log")), tuple(one for one in series if one.points),
                 tuple(str(note) for note in _items(sweep, "notes")))


def _points(values: Mapping[str, Any], key: str) -> tuple[tuple[float, float], ...]:
    pairs = ((number(point[0]), number(point[1])) for point in _items(values, key))
    return tuple((x, y) for x, y in pairs if x is not None and y is not None)


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _items(values: Mapping[str, Any], key: str) -> Sequence[Any]:
    inner = values.get(key)
    return inner if isinstance(inner, list | tuple) else ()


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "" if value is None else str(value)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items() if value not in (None, "")}

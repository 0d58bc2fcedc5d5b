"""Curves: tokens returned over time, distributions of latency, and sweeps against theory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from slotwise.bench.report import svg
from slotwise.bench.report.data import Run, Sweep
from slotwise.bench.report.svg import Axis, fitted, linear, logarithmic, plot, tag
from slotwise.bench.report.words import tick, tick_seconds, tick_share

HEIGHT = 250.0
COLOURS = 10
WIDE = 20.0  # from this ratio of largest to smallest on, seconds are drawn on a logarithmic axis


def cumulative(runs: Sequence[Run], colours: Sequence[str]) -> Markup:
    """Output tokens returned to clients over time, every run in one picture."""
    curves = [(run, _from_zero(run.cumulative)) for run in runs if run.cumulative]
    if not curves:
        return Markup("")
    x = fitted("seconds since the first request", max(points[-1][0] for _, points in curves), tick_seconds)
    y = linear("output tokens returned", (tokens for _, points in curves for _, tokens in points), tick, most=5)
    drawn = [_curve(_stairs(points), x, y, colours[run.index]) for run, points in curves]
    ends = [_point(points[-1], (x, y), 0, colours[run.index]) for run, points in curves]
    return plot("Output tokens returned over time", (x, y), drawn, ends, HEIGHT)


def distribution(title: str, runs: Sequence[Run], colours: Sequence[str],
                 values_of: Callable[[Run], Sequence[float]]) -> Markup:
    """The share of samples at or below each latency (empirical distribution), every run in one picture."""
    curves = [(run, values_of(run)) for run in runs if any(value > 0 for value in values_of(run))]
    if not curves:
        return Markup("")
    every = [value for _, values in curves for value in values if value > 0]
    spread = logarithmic if max(every) > WIDE * min(every) else linear
    x = spread("", every, tick_seconds, most=6)
    y = Axis("share at or below", 0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), tick_share)
    drawn = [_curve(_shares(values, x), x, y, colours[run.index]) for run, values in curves]
    return plot(title, (x, y), drawn, (), HEIGHT)


def sweep(swept: Sweep) -> Markup:
    """Measured points joined by lines; theory dashed in the same colour."""
    points = [point for series in swept.series for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x = svg.at_values(_axis(swept.x.label, xs, swept.x.log), xs)
    y = _axis(swept.y.label, ys, swept.y.log)
    places = series_places(swept)
    drawn, marked = [], []
    for series, place in zip(swept.series, places, strict=True):
        colour = f"c{place % COLOURS}"
        drawn.append(_curve(series.points, x, y, f"{colour} {'theory' if series.theory else 'solid'}"))
        if not series.theory:
            marked += [_point(point, (x, y), place, colour) for point in series.points]
    return plot(f"{swept.title}: {swept.y.label} against {swept.x.label}", (x, y), drawn, marked, HEIGHT)


def series_places(swept: Sweep) -> list[int]:
    """Index of the colour and shape of each series; a measurement and its theory have one subject, and share both."""
    order = list(dict.fromkeys(series.subject for series in swept.series))
    return [order.index(series.subject) for series in swept.series]


def _axis(label: str, values: Sequence[float], log: bool) -> Axis:
    if log and all(value > 0 for value in values):
        return logarithmic(label, values, tick, most=8)
    return linear(label, values, tick)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """A sample of line for every `(label, style)`, inline in a list."""
    return svg.group(tag("li", _sample(style), " " + label) for label, style in entries)


def sweep_legend(swept: Sweep) -> Markup:
    """The meaning of each colour, once for a measurement and its theory, and of dashes."""
    named = dict(zip(series_places(swept), (series.subject for series in swept.series), strict=True))
    entries = [
        tag("li", _sample(f"c{place % COLOURS} solid", svg.marker((0.5, 7), place, f"c{place % COLOURS}")), " " + text)
        for place, text in sorted(named.items())]
    if any(series.theory for series in swept.series):
        entries.append(tag("li", _sample("plain theory"), " theory"))
    return svg.group(entries)


def _sample(style: str, point: str = "") -> Markup:
    return tag("svg", tag("path", d="M1 7H27", class_=f"curve {style}"), point, width=28, height=14,
               aria_hidden="true")


def _from_zero(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(0.0, 0.0), *points]


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A step function: level until the next point, then straight up."""
    stairs = [points[0]]
    for x, y in points[1:]:
        stairs += [(x, stairs[-1][1]), (x, y)]
    return stairs


def _shares(values: Sequence[float], x: Axis) -> list[tuple[float, float]]:
    """The steps of an empirical distribution over the whole axis."""
    points = [(value, (index + 1) / len(values)) for index, value in enumerate(values)]
    return [*_stairs([(x.low, 0.0), *points]), (x.high, 1.0)]


def _curve(points: Sequence[tuple[float, float]], x: Axis, y: Axis, style: str) -> Markup:
    return tag("path", d=svg.path_through(points, x, y, HEIGHT), class_=f"curve {style}")


def _point(point: tuple[float, float], frame: tuple[Axis, Axis], shape: int, style: str) -> Markup:
    x, y = frame
    return svg.marker((x.place(point[0]), (1 - y.place(point[1])) * HEIGHT), shape, style)

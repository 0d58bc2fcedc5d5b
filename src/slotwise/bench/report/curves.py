"""Curves: tokens returned over time, distributions of latency, and sweeps against theory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from slotwise.bench.report import svg
from slotwise.bench.report.data import Run, Series, Sweep
from slotwise.bench.report.svg import Axis, fitted, linear, logarithmic, plot, tag
from slotwise.bench.report.words import tick, tick_seconds, tick_share

HEIGHT = 250.0
COLOURS = 8
WIDE = 20.0  # from such a ratio of largest to smallest on, seconds are drawn on a logarithmic axis


def cumulative(runs: Sequence[Run], colours: Sequence[str]) -> Markup:
    """Output tokens that had reached their clients, over time, every run in one picture."""
    curves = [(run, _from_zero(run.cumulative)) for run in runs if run.cumulative]
    if not curves:
        return Markup("")
    x = fitted("seconds since the first request", max(points[-1][0] for _, points in curves), tick_seconds)
    y = linear("output tokens returned", (tokens for _, points in curves for _, tokens in points), tick, most=5)
    marks = [_curve(_stairs(points), x, y, colours[run.index]) for run, points in curves]
    marks += [_dots([points[-1]], x, y, colours[run.index]) for run, points in curves]
    return plot("Output tokens returned over time", x, y, marks, HEIGHT)


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
    marks = [_curve(_shares(values, x), x, y, colours[run.index]) for run, values in curves]
    return plot(title, x, y, marks, HEIGHT)


def sweep(swept: Sweep) -> Markup:
    """Measured points joined by lines, theory dashed."""
    points = [point for series in swept.series for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x = _axis(swept.x_label, xs, swept.x_log)
    y = _axis(swept.y_label, ys, swept.y_log)
    if len({*xs}) <= 8:
        x = svg.at_values(x, xs)
    marks = []
    for series, (colour, square) in zip(swept.series, series_styles(swept.series), strict=True):
        marks.append(_curve(series.points, x, y, colour + (" theory" if series.theory else "")))
        if not series.theory:
            marks.append(_dots(series.points, x, y, colour + (" square" if square else "")))
    return plot(f"{swept.title}: {swept.y_label} against {swept.x_label}", x, y, marks, HEIGHT)


def series_styles(series: Sequence[Series]) -> list[tuple[str, bool]]:
    """A colour for each series, the same for a measurement and its theory, and whether its points are square."""
    order: dict[str, int] = {}
    for one in series:
        order.setdefault(_subject_of(one.label), len(order))
    places = [order[_subject_of(one.label)] for one in series]
    return [(f"c{place % COLOURS}", place % 2 == 1) for place in places]


def _subject_of(label: str) -> str:
    """What a series is about, without whether it was measured or computed."""
    words = re.findall(r"[\w.]+", label.lower())
    return " ".join(word for word in words if word not in ("measured", "theory", "predicted", "fitted", "computed"))


def _axis(label: str, values: Sequence[float], log: bool) -> Axis:
    if log and all(value > 0 for value in values):
        return logarithmic(label, values, tick)
    return linear(label, values, tick)


def sample(style: str, *, dotted: bool = False) -> Markup:
    """The piece of line that stands for a curve in its legend."""
    dot = tag("path", d="M14 7h0", class_=f"dots {style}") if dotted else Markup("")
    return tag("svg", tag("path", d="M1 7H27", class_=f"curve {style}"), dot, width=28, height=14, aria_hidden="true")


def legend(entries: Iterable[tuple[str, str, bool]]) -> Markup:
    """`(label, style, dotted)` for every curve, inline in a list."""
    return svg.group(tag("li", sample(style, dotted=dotted), " " + label) for label, style, dotted in entries)


def sweep_legend(swept: Sweep) -> Markup:
    styles = zip(swept.series, series_styles(swept.series), strict=True)
    return legend(
        (series.label, colour + (" theory" if series.theory else " square" if square else ""), not series.theory)
        for series, (colour, square) in styles)


def _from_zero(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(0.0, 0.0), *points]


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Tokens come in jumps: level until the next point, then straight up."""
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


def _dots(points: Sequence[tuple[float, float]], x: Axis, y: Axis, style: str) -> Markup:
    return tag("path", d=svg.dots_at(points, x, y, HEIGHT), class_=f"dots {style}")

"""Hand-made SVG: scales, ticks and the frame of every plot; bars, curves, and the knee of goodput against load.

A plot is as wide as its figure.  Text and grid lines are placed in percent and in pixels, so type keeps its size on a
phone; curves and cells lie in a nested drawing of `WIDTH` units that is stretched under strokes that do not scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from slotwise.measure.bench.report.data import DisciplineRun, Sweep
from slotwise.measure.bench.report.words import tick, tick_seconds, tick_share

WIDTH = 1000.0
SHAPES = ("M-4.5 0A4.5 4.5 0 0 1 4.5 0A4.5 4.5 0 0 1 -4.5 0z", "M-4-4H4V4H-4z",
          "M0-6L6 0L0 6L-6 0z", "M0-5.5L5.5 4H-5.5z")
BAR_ROW, BAR_THICK = 44, 14
PLOT_HEIGHT = 250.0
COLORS = 10
WIDE = 20.0  # from this ratio of largest to smallest on, seconds are drawn on a logarithmic axis
KNEE_WIDTH, KNEE_HEIGHT = 634, 290
KNEE_LEFT, KNEE_RIGHT, KNEE_TOP, KNEE_BOTTOM = 54, 614, 40, 250
KNEE_STYLE = ("text { fill: #333 } .grid { stroke: #ddd } .line { fill: none; stroke: #2a6fbb; stroke-width: 2 } "
         ".ideal { stroke: #999; stroke-dasharray: 4 4 } .knee { fill: #c43 }")


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """One element.  `class_` is `class`, other underscores are hyphens; None leaves an attribute out."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            key = "class" if key == "class_" else key.replace("_", "-")
            parts.append(f'{key}="{escape(_plain(value) if isinstance(value, float) else value)}"')
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{' '.join(parts)}>{inner}</{name}>" if inner else f"<{' '.join(parts)}/>")


def group(elements: Iterable[Markup]) -> Markup:
    return Markup("").join(elements)


def percent(part: float) -> str:
    return f"{_plain(part * 100)}%"


def _plain(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


@dataclass(frozen=True)
class Axis:
    """One direction of a plot: values from `low` to `high`, and its ticks."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    log: bool = False

    def place(self, value: float) -> float:
        """Position of `value` between the ends, 0 to 1, clamped."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear(label: str, values: Iterable[float], text: Callable[[float], str], *, most: int = 6) -> Axis:
    """An axis from zero (or the lowest value below it) to the first round number that holds every value."""
    values = [*values, 0.0]
    low, high = min(values), max(values)
    if high - low < 1e-12:
        high = low + 1.0
    step = round_step((high - low) / most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(label, ticks[0], ticks[-1], ticks, text)


def fitted(label: str, high: float, text: Callable[[float], str], *, most: int = 8) -> Axis:
    """An axis from zero that ends exactly at `high`, with round ticks inside."""
    high = high if high > 0 else 1.0
    step = round_step(high / most)
    return Axis(label, 0.0, high, tuple(index * step for index in range(int(high / step + 1e-9) + 1)), text)


def logarithmic(label: str, values: Iterable[float], text: Callable[[float], str], *, most: int = 6) -> Axis:
    """A logarithmic axis; values that are not positive stay on its lower end."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    for marks in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        every = [mark * 10.0**decade for decade in decades for mark in marks]
        first = max(value for value in every if value <= low * 1.0001)
        last = min(value for value in every if value >= high / 1.0001 and value > first)
        ticks = tuple(value for value in every if first <= value <= last)
        if len(ticks) <= most:
            break
    return Axis(label, first, last, ticks[::math.ceil(len(ticks) / most)], text, log=True)


def at_values(axis: Axis, values: Sequence[float]) -> Axis:
    """A tick at each measured value, from the first to the last, where they are few, round and apart; else `axis`."""
    if len({*values}) not in range(2, 10) or any(len(axis.text(value)) > 5 for value in values):
        return axis
    ticks = tuple(sorted({*values}))
    closer = replace(axis, low=ticks[0], high=ticks[-1], ticks=ticks)
    apart = all(closer.place(right) - closer.place(left) > 0.08 for left, right in pairwise(ticks))
    return closer if apart else axis


def round_step(size: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(mark * power for mark in (1, 2, 5, 10) if mark * power >= size * (1 - 1e-9))


def canvas(elements: Iterable[Markup], height: float, width: float = WIDTH) -> Markup:
    """A nested drawing of `width` x `height` units, stretched to the plot's full width."""
    return tag("svg", *elements, width="100%", height=height, viewBox=f"0 0 {_plain(width)} {_plain(height)}",
               preserveAspectRatio="none")


def path_through(points: Iterable[tuple[float, float]], x: Axis, y: Axis, height: float) -> str:
    """The data of a path through `points`."""
    return "M" + "L".join(
        f"{_plain(x.place(a) * WIDTH)} {_plain((1 - y.place(b)) * height)}" for a, b in points)


def marker(place: tuple[float, float], shape: int, style: str) -> Markup:
    """A point, `place` from the left as a share of the width and from the top in pixels; shapes count from 0."""
    return tag("svg", tag("path", d=SHAPES[shape % len(SHAPES)], class_=f"point {style}"), x=percent(place[0]),
               y=place[1])


def plot(title: str, frame: tuple[Axis, Axis], curves: Iterable[Markup], points: Iterable[Markup],
         height: float) -> Markup:
    """A plot framed by axes x and y.  Curves lie in the stretched drawing, points upon it; `title` is its label."""
    x, y = frame
    bottom = height + 18
    rows = (
        tag("line", x1=0, x2="100%", y1=place, y2=place, class_="rule")
        + tag("text", tick_text, x=-8, y=place + 4, text_anchor="end", class_="tick")
        for place, tick_text in (((1 - y.place(tick)) * height, y.text(tick)) for tick in y.ticks))
    columns = (
        tag("line", x1=percent(x.place(tick)), x2=percent(x.place(tick)), y1=height, y2=height + 4, class_="axis")
        + tag("text", x.text(tick), x=percent(x.place(tick)), y=bottom, text_anchor="middle", class_="tick")
        for tick in x.ticks)
    return tag(
        "svg", tag("title", title), *rows, *columns,
        tag("line", x1=0, x2="100%", y1=height, y2=height, class_="axis"),
        canvas(curves, height), *points,
        tag("text", y.label, x=-60, y=-14, class_="label"),
        tag("text", x.label, x="100%", y=height + 38, text_anchor="end", class_="label"),
        class_="plot", role="img", aria_label=title, style=f"height:{_plain(height + 76)}px")


# -- bars --------------------------------------------------------------------------------------------------------------


class BarRow(NamedTuple):
    """One row: its parts from left to right, each a style and a size, and the text above it.

    A thin line extends from the bar to the worst value, if there is one.
    """

    label: str
    parts: Sequence[tuple[str, float | None]]
    text: str
    worst: float | None = None

    @property
    def total(self) -> float:
        return sum(size or 0.0 for _, size in self.parts)


def bars(title: str, rows: Sequence[BarRow]) -> Markup:
    """Horizontal bars from zero on one scale."""
    longest = max([size for row in rows for size in (row.total, row.worst or 0.0)], default=0.0) or 1.0
    drawn = [element for index, row in enumerate(rows) for element in _bar(row, longest, index * BAR_ROW)]
    return tag("svg", tag("title", title), *drawn, class_="bars", role="img", aria_label=title,
               style=f"height:{len(rows) * BAR_ROW}px")


def _bar(row: BarRow, longest: float, top: int) -> list[Markup]:
    y, place = top + 20, 0.0
    drawn = [tag("text", row.label, x=0, y=top + 13, class_="name"),
             tag("text", row.text, x="100%", y=top + 13, text_anchor="end", class_="value")]
    for style, size in row.parts:
        if size:
            drawn.append(tag("rect", x=percent(place / longest), y=y, width=percent(size / longest), height=BAR_THICK,
                             class_=style))
            place += size
    if place and row.worst:
        here, there, middle = percent(place / longest), percent(row.worst / longest), y + BAR_THICK / 2
        color = row.parts[0][0].replace("fill", "line")
        drawn += [tag("line", x1=here, x2=there, y1=middle, y2=middle, class_=color),
                  tag("line", x1=there, x2=there, y1=middle - 5, y2=middle + 5, class_=color)]
    return drawn


# -- curves ------------------------------------------------------------------------------------------------------------


def cumulative(runs: Sequence[DisciplineRun], colors: Sequence[str]) -> Markup:
    """Output tokens returned to clients over time, every run in one picture."""
    curves = [(run, _from_zero(run.cumulative)) for run in runs if run.cumulative]
    if not curves:
        return Markup("")
    x = fitted("seconds since the first request", max(points[-1][0] for _, points in curves), tick_seconds)
    y = linear("output tokens returned", (tokens for _, points in curves for _, tokens in points), tick, most=5)
    drawn = [_curve(_stairs(points), x, y, colors[run.index]) for run, points in curves]
    ends = [_point(points[-1], (x, y), 0, colors[run.index]) for run, points in curves]
    return plot("Output tokens returned over time", (x, y), drawn, ends, PLOT_HEIGHT)


def distribution(title: str, runs: Sequence[DisciplineRun], colors: Sequence[str],
                 values_of: Callable[[DisciplineRun], Sequence[float]]) -> Markup:
    """The share of samples at or below each latency (empirical distribution), every run in one picture."""
    curves = [(run, values_of(run)) for run in runs if any(value > 0 for value in values_of(run))]
    if not curves:
        return Markup("")
    every = [value for _, values in curves for value in values if value > 0]
    spread = logarithmic if max(every) > WIDE * min(every) else linear
    x = spread("", every, tick_seconds, most=6)
    y = Axis("share at or below", 0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), tick_share)
    drawn = [_curve(_shares(values, x), x, y, colors[run.index]) for run, values in curves]
    return plot(title, (x, y), drawn, (), PLOT_HEIGHT)


def sweep(swept: Sweep) -> Markup:
    """Measured points joined by lines; theory dashed in the same color."""
    points = [point for series in swept.series for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x = at_values(_axis(swept.x.label, xs, swept.x.log), xs)
    y = _axis(swept.y.label, ys, swept.y.log)
    places = series_places(swept)
    drawn, marked = [], []
    for series, place in zip(swept.series, places, strict=True):
        color = f"c{place % COLORS}"
        drawn.append(_curve(series.points, x, y, f"{color} {'theory' if series.theory else 'solid'}"))
        if not series.theory:
            marked += [_point(point, (x, y), place, color) for point in series.points]
    return plot(f"{swept.title}: {swept.y.label} against {swept.x.label}", (x, y), drawn, marked, PLOT_HEIGHT)


def series_places(swept: Sweep) -> list[int]:
    """Index of the color and shape of each series; a measurement and its theory have one subject, and share both."""
    order = list(dict.fromkeys(series.subject for series in swept.series))
    return [order.index(series.subject) for series in swept.series]


def _axis(label: str, values: Sequence[float], log: bool) -> Axis:
    if log and all(value > 0 for value in values):
        return logarithmic(label, values, tick, most=8)
    return linear(label, values, tick)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """A sample of line for every `(label, style)`, inline in a list."""
    return group(tag("li", _sample(style), " " + label) for label, style in entries)


def sweep_legend(swept: Sweep) -> Markup:
    """The meaning of each color, once for a measurement and its theory, and of dashes."""
    named = dict(zip(series_places(swept), (series.subject for series in swept.series), strict=True))
    entries = [
        tag("li", _sample(f"c{place % COLORS} solid", marker((0.5, 7), place, f"c{place % COLORS}")), " " + text)
        for place, text in sorted(named.items())]
    if any(series.theory for series in swept.series):
        entries.append(tag("li", _sample("plain theory"), " theory"))
    return group(entries)


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
    return tag("path", d=path_through(points, x, y, PLOT_HEIGHT), class_=f"curve {style}")


def _point(point: tuple[float, float], frame: tuple[Axis, Axis], shape: int, style: str) -> Markup:
    x, y = frame
    return marker((x.place(point[0]), (1 - y.place(point[1])) * PLOT_HEIGHT), shape, style)


# -- goodput against load ----------------------------------------------------------------------------------------------

Point = tuple[float, float]


def knee_plot(title: str, points: Sequence[Point], knee: Point | None) -> str:
    """Returns an SVG file of (offered, goodput) points in requests a second; `knee` is one of them, or None."""
    x = linear("offered requests a second", [one for one, _ in points], "{:g}".format)
    y = linear("goodput, requests a second", [one for point in points for one in point], "{:g}".format)
    corners = " ".join(f"{_x(x, offered):.1f},{_y(y, good):.1f}" for offered, good in points)
    most = min(x.high, y.high)
    parts = [
        tag("style", KNEE_STYLE), tag("text", title, x=KNEE_LEFT, y=18, font_weight=600), *_grid(x, y),
        tag("line", class_="ideal", x1=_x(x, 0), y1=_y(y, 0), x2=_x(x, most), y2=_y(y, most)),
        tag("polyline", class_="line", points=corners)]
    if knee is not None:
        parts += [tag("circle", class_="knee", cx=_x(x, knee[0]), cy=_y(y, knee[1]), r=5),
                  tag("text", f"objective met up to {knee[0]:.3g}/s", x=_x(x, knee[0]), y=_y(y, knee[1]) - 12,
                      text_anchor="end")]
    return str(tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {KNEE_WIDTH} {KNEE_HEIGHT}",
                   role="img", font_family="system-ui, sans-serif", font_size=12, aria_label=title)) + "\n"


def _x(axis: Axis, value: float) -> float:
    return KNEE_LEFT + axis.place(value) * (KNEE_RIGHT - KNEE_LEFT)


def _y(axis: Axis, value: float) -> float:
    return KNEE_BOTTOM - axis.place(value) * (KNEE_BOTTOM - KNEE_TOP)


def _grid(x: Axis, y: Axis) -> list[Markup]:
    """The lines and numbers of both axes, and their labels."""
    parts = [tag("text", x.label, x=KNEE_RIGHT, y=KNEE_HEIGHT - 6, text_anchor="end"),
             tag("text", y.label, x=KNEE_LEFT, y=KNEE_TOP - 8)]
    for at in x.ticks:
        parts.append(tag("text", x.text(at), x=_x(x, at), y=KNEE_BOTTOM + 16, text_anchor="middle"))
    for at in y.ticks:
        parts += [tag("line", class_="grid", x1=KNEE_LEFT, x2=KNEE_RIGHT, y1=_y(y, at), y2=_y(y, at)),
                  tag("text", y.text(at), x=KNEE_LEFT - 6, y=_y(y, at) + 4, text_anchor="end")]
    return parts

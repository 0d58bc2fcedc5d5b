"""Hand-made SVG: elements, scales, ticks, and the frame that every plot shares.

A plot is as wide as its figure.  Text and grid lines are placed in percent and in pixels, so type keeps its size on a
phone; curves and cells lie in a nested drawing of `WIDTH` units that is stretched under strokes that do not scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup, escape

WIDTH = 1000.0
SHAPES = ("M-4.5 0A4.5 4.5 0 0 1 4.5 0A4.5 4.5 0 0 1 -4.5 0z", "M-4-4H4V4H-4z",
          "M0-6L6 0L0 6L-6 0z", "M0-5.5L5.5 4H-5.5z")


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

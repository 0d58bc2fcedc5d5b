"""Goodput against offered load, with the knee marked: the largest load at which the objective holds."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from slotwise.bench.report.svg import Axis, linear, tag

Point = tuple[float, float]

WIDTH, HEIGHT = 634, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 614, 40, 250
STYLE = ("text { fill: #333 } .grid { stroke: #ddd } .line { fill: none; stroke: #2a6fbb; stroke-width: 2 } "
         ".ideal { stroke: #999; stroke-dasharray: 4 4 } .knee { fill: #c43 }")


def knee_plot(title: str, points: Sequence[Point], knee: Point | None) -> str:
    """Returns an SVG file of (offered, goodput) points in requests a second; `knee` is one of them, or None."""
    x = linear("offered requests a second", [one for one, _ in points], "{:g}".format)
    y = linear("goodput, requests a second", [one for point in points for one in point], "{:g}".format)
    corners = " ".join(f"{_x(x, offered):.1f},{_y(y, good):.1f}" for offered, good in points)
    most = min(x.high, y.high)
    parts = [
        tag("style", STYLE), tag("text", title, x=LEFT, y=18, font_weight=600), *_grid(x, y),
        tag("line", class_="ideal", x1=_x(x, 0), y1=_y(y, 0), x2=_x(x, most), y2=_y(y, most)),
        tag("polyline", class_="line", points=corners)]
    if knee is not None:
        parts += [tag("circle", class_="knee", cx=_x(x, knee[0]), cy=_y(y, knee[1]), r=5),
                  tag("text", f"objective met up to {knee[0]:.3g}/s", x=_x(x, knee[0]), y=_y(y, knee[1]) - 12,
                      text_anchor="end")]
    return str(tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
                   font_family="system-ui, sans-serif", font_size=12, aria_label=title)) + "\n"


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (RIGHT - LEFT)


def _y(axis: Axis, value: float) -> float:
    return BOTTOM - axis.place(value) * (BOTTOM - TOP)


def _grid(x: Axis, y: Axis) -> list[Markup]:
    """The lines and numbers of both axes, and their labels."""
    parts = [tag("text", x.label, x=RIGHT, y=HEIGHT - 6, text_anchor="end"), tag("text", y.label, x=LEFT, y=TOP - 8)]
    for tick in x.ticks:
        parts.append(tag("text", x.text(tick), x=_x(x, tick), y=BOTTOM + 16, text_anchor="middle"))
    for tick in y.ticks:
        parts += [tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=_y(y, tick), y2=_y(y, tick)),
                  tag("text", y.text(tick), x=LEFT - 6, y=_y(y, tick) + 4, text_anchor="end")]
    return parts

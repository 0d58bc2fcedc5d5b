"""Bars: one measure for every run, or the parts of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from slotwise.bench.report.svg import percent, tag

ROW, THICK = 44, 14


class Bar(NamedTuple):
    """One row: its parts from left to right, each a style and a size, and the text beside it.

    A thin line extends from the bar to the worst value, if there is one.
    """

    label: str
    parts: Sequence[tuple[str, float | None]]
    text: str
    worst: float | None = None

    @property
    def total(self) -> float:
        return sum(size or 0.0 for _, size in self.parts)


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Horizontal bars from zero on one scale."""
    longest = max([size for row in rows for size in (row.total, row.worst or 0.0)], default=0.0) or 1.0
    drawn = [element for index, row in enumerate(rows) for element in _bar(row, longest, index * ROW)]
    return tag("svg", tag("title", title), *drawn, class_="bars", role="img", aria_label=title,
               style=f"height:{len(rows) * ROW}px")


def _bar(row: Bar, longest: float, top: int) -> list[Markup]:
    y, place = top + 20, 0.0
    drawn = [tag("text", row.label, x=0, y=top + 13, class_="name"),
             tag("text", row.text, x="100%", y=top + 13, text_anchor="end", class_="value")]
    for style, size in row.parts:
        if size:
            drawn.append(tag("rect", x=percent(place / longest), y=y, width=percent(size / longest), height=THICK,
                             class_=style))
            place += size
    if place and row.worst:
        here, there, middle = percent(place / longest), percent(row.worst / longest), y + THICK / 2
        colour = row.parts[0][0].replace("fill", "line")
        drawn += [tag("line", x1=here, x2=there, y1=middle, y2=middle, class_=colour),
                  tag("line", x1=there, x2=there, y1=middle - 5, y2=middle + 5, class_=colour)]
    return drawn

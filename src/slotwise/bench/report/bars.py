"""Bars: one measure for every run, and the parts of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from slotwise.bench.report.svg import percent, tag

ROW, THICK = 44, 14


@dataclass(frozen=True)
class Bar:
    """One row: its value, its worst value (or None), and the text beside it."""

    label: str
    colour: str
    value: float | None
    worst: float | None
    text: str


@dataclass(frozen=True)
class Stack:
    """One row of parts: for each its kind (a class of the style sheet) and its size."""

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str

    @property
    def total(self) -> float:
        return sum(size for _, size in self.parts)


def bars(title: str, rows: Sequence[Bar]) -> Markup:
    """Horizontal bars from zero; a thin line extends from the bar to the worst value."""
    longest = max([size for row in rows for size in (row.value, row.worst) if size is not None], default=0.0) or 1.0
    drawn = []
    for index, row in enumerate(rows):
        y = index * ROW
        drawn += [_words(row.label, row.text, y), tag("rect", y=y + 20, width="100%", height=THICK, class_="ground")]
        if row.value is not None:
            drawn.append(tag("rect", y=y + 20, width=percent(row.value / longest), height=THICK,
                             class_=f"fill {row.colour}"))
        if row.value is not None and row.worst:
            drawn.append(_worst(row, longest, y + 20 + THICK / 2))
    return _figure(title, drawn, len(rows))


def _worst(row: Bar, longest: float, y: float) -> Markup:
    here, there = percent((row.value or 0.0) / longest), percent((row.worst or 0.0) / longest)
    colour = f"line {row.colour}"
    return tag("line", x1=here, x2=there, y1=y, y2=y, class_=colour) + tag(
        "line", x1=there, x2=there, y1=y - 5, y2=y + 5, class_=colour)


def stacks(title: str, rows: Sequence[Stack]) -> Markup:
    """Horizontal stacked bars on one scale, parts from left to right."""
    longest = max((row.total for row in rows), default=0.0) or 1.0
    drawn = []
    for index, row in enumerate(rows):
        y, place = index * ROW, 0.0
        drawn.append(_words(row.label, row.text, y))
        for kind, size in row.parts:
            if size > 0:
                drawn.append(tag("rect", x=percent(place / longest), y=y + 20, width=percent(size / longest),
                                 height=THICK, class_=f"part {kind}"))
            place += size
    return _figure(title, drawn, len(rows))


def _words(label: str, text: str, y: float) -> Markup:
    return tag("text", label, x=0, y=y + 13, class_="name") + tag(
        "text", text, x="100%", y=y + 13, text_anchor="end", class_="value")


def _figure(title: str, drawn: Sequence[Markup], rows: int) -> Markup:
    return tag("svg", tag("title", title), *drawn, class_="bars", role="img", aria_label=title,
               style=f"height:{rows * ROW}px")

"""The report of a comparison: one HTML file with its pictures, style and script inside; nothing is fetched.

`data` reads a result, `words` formats numbers and sentences, `svg` holds scales and frames, `lanes`, `bars` and
`curves` draw, `tables` and `page` assemble, and `assets` holds the template, style and script.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from slotwise.bench.report import lanes, page
from slotwise.bench.report.data import Result, read
from slotwise.bench.report.svg import tag
from slotwise.files import write_output

__all__ = ["render", "slot_charts", "write_report"]

PICTURE_WIDTH = 1000  # pixels, of a chart in a file of its own


def render(result: Mapping[str, Any]) -> str:
    """The page for a result of `slotwise compare` (version 1), whole or interrupted.

    Raises:
        ValueError: the result is of another version.
    """
    templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string(_asset("page.html"))
    return template.render(page.context(_checked(result)), style=Markup(_asset("page.css") + _asset("chart.css")),
                           script=Markup(_asset("page.js")))


def write_report(result: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """Write the page to `path`."""
    write_output(Path(path), render(result).encode())


def slot_charts(result: Mapping[str, Any]) -> dict[str, str]:
    """The slot x step chart of every run by its label, against seconds on one scale, each a complete SVG file."""
    charts = page.charts_of(_checked(result).runs)
    drawn = charts["views"]["seconds"]["runs"] if charts else ()
    return {run["label"]: _standing_alone(run["picture"], run["height"]) for run in drawn}


def _standing_alone(picture: Markup, height: int) -> Markup:
    ground = tag("rect", width="100%", height="100%", fill="var(--page)")
    placed = tag("svg", picture, x=30, y=8, width=PICTURE_WIDTH - 126, height=height)  # the style sheet's padding
    return tag("svg", tag("style", Markup(_asset("chart.css"))), lanes.patterns(), ground, placed, Markup("\n"),
               xmlns="http://www.w3.org/2000/svg", width=PICTURE_WIDTH, height=height,
               viewBox=f"0 0 {PICTURE_WIDTH} {height}")


def _checked(result: Mapping[str, Any]) -> Result:
    version = result.get("version", 1)
    if version != 1:
        raise ValueError(f"this report reads results of version 1, not {version!r}")
    return read(result)


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text("utf-8")

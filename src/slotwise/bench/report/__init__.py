"""The report of a comparison: one HTML file with its pictures, style and script inside; nothing is fetched.

`data` reads a result, `words` says it, `svg` holds scales and frames, `lanes`, `bars` and `curves` draw, `tables` and
`page` put it together, and `assets` holds its template, style and script.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from slotwise.bench.report.data import read
from slotwise.bench.report.page import context

__all__ = ["render", "write_report"]


def render(result: Mapping[str, Any]) -> str:
    """The page for a result of `slotwise compare` (version 1), whole or interrupted."""
    version = result.get("version", 1)
    if version != 1:
        raise ValueError(f"this report reads results of version 1, not {version!r}")
    files = resources.files(__package__) / "assets"
    sources = {name: Markup((files / name).read_text("utf-8")) for name in ("page.css", "chart.css", "page.js")}
    templates = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string((files / "page.html").read_text("utf-8"))
    return template.render(context(read(result)), style=sources["page.css"] + sources["chart.css"],
                           script=sources["page.js"])


def write_report(result: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """Writes the page to `path`."""
    Path(path).write_text(render(result), "utf-8")

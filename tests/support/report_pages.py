"""What the tests of the report share: an example, and a reader of pages."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from html.parser import HTMLParser
from typing import Any

from support.example_result import result as example

RESULT = example(count=24, slots=4)
BOX = re.compile(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+z")


class Charts(HTMLParser):
    """The slot charts of a page: for each, its view, and the boxes (left, top, right, bottom) of every kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.views: dict[str, list[dict[str, list[tuple[float, ...]]]]] = defaultdict(list)
        self._view = ""
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        kind = given.get("class", "")
        self.ids += [given["id"]] if "id" in given else []
        if kind.startswith("scroll charts "):
            self._view = kind.split()[-1]
        elif tag == "svg" and kind == "lanes":
            self.views[self._view].append(defaultdict(list))
        elif tag == "path" and self._view and "d" in given and self.views[self._view]:
            self.views[self._view][-1][kind] += [tuple(map(float, box)) for box in BOX.findall(given["d"])]

    handle_startendtag = handle_starttag


def text_of(page: str) -> str:
    """What a reader reads, without mark-up, style and script."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def with_runs(*names: str) -> dict[str, Any]:
    changed = copy.deepcopy(RESULT)
    changed["runs"] = [run for name in names for run in changed["runs"] if run["name"] == name]
    return changed

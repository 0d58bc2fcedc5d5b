"""The list of all pages, from the navigation of the site."""

from __future__ import annotations

import os

import yaml
from docs.generate.blocks import ROOT

PAGE = ROOT / "docs" / "reference" / "pages.md"


def pages() -> str:
    """Returns a heading and links for each part of the navigation in `mkdocs.yml`.  The README has none."""
    parts = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return "\n\n".join(f"## {title}\n\n" + "\n".join(map(_link, entries))
                       for part in parts for title, entries in part.items() if isinstance(entries, list))


def _link(entry: dict[str, str]) -> str:
    [(title, file)] = entry.items()
    return f"- [{title}]({os.path.relpath(ROOT / file, PAGE.parent)})"

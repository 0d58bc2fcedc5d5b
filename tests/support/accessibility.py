"""What axe-core finds on a page that keeps people from using it, by the rules of WCAG 2.2, levels A and AA."""

from __future__ import annotations

from typing import Any

OPTIONS = {
    "resultTypes": ["violations"],
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}


def violations(page: Any) -> list[str]:
    """A line for each violation: its rule, the elements, and what would have to change."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options=OPTIONS).response["violations"]
    return [f"{one['id']}: {node['target']} {node['html'][:160]} {node['failureSummary']}"
            for one in found for node in one["nodes"]]

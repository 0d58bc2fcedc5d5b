"""How a part of the check reports figures: one line each at once, so that a part cut short keeps its figures."""

from __future__ import annotations

import json
from typing import Any

MARK = "FIGURES "


def tell(**figures: Any) -> None:
    """Prints figures by name for the parent process."""
    print(MARK + json.dumps(figures), flush=True)


def told(output: str) -> dict[str, Any]:
    """Returns all figures in a process' output; of several values of one figure the last counts."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            found |= json.loads(line.removeprefix(MARK))
    return found

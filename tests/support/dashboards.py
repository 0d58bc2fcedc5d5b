"""The dashboard and the alert rules that come with the package, and the metrics they name."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import yaml

FOLDER = resources.files("slotwise.observe") / "dashboard"
SELECTOR = re.compile(r"(slotwise:\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"by \(([^)]*)\)")
VARIABLES = {"$__rate_interval": "1m", "$__range": "30m", "$model": ".*"}


def board() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana.json").read_text())


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def queries() -> list[str]:
    """Of all panels, as Grafana would send them."""
    found = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        found = [expr.replace(name, value) for expr in found]
    return found


def names(expr: str) -> set[str]:
    return {name for name, _ in SELECTOR.findall(expr)}


def labels(expr: str) -> set[str]:
    """Those that a query selects or groups by."""
    selected = {part.split("=")[0].rstrip("!~ ") for _, inside in SELECTOR.findall(expr) if inside
                for part in inside.split(", ")}
    return selected | {label.strip() for inside in GROUPED.findall(expr) for label in inside.split(",")}

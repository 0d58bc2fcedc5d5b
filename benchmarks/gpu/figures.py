"""How a part of the check reports figures, and their targets.

A figure is one line at once, so that a part cut short keeps its figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

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


Figures = dict[str, Any]


class Target(NamedTuple):
    """One figure and its bound."""

    name: str
    find: Callable[[Figures], float]  # raises KeyError where it was not measured
    at_least: float | None = None
    at_most: float | None = None


def _decode(rows: int) -> Target:
    return Target(f"decode at {rows} rows, of the time its bytes take to be copied",
                  lambda figures: figures["decode"][str(rows)]["of_roofline"], at_least=0.85)


TARGETS = (
    *(_decode(rows) for rows in (1, 16, 64, 256)),
    Target("prefill steps of 8,192 tokens, of the product rate",
           lambda figures: figures["prefill"]["of_product_rate"], at_least=0.70),
    Target("share of steady decode at 256 rows in which the device idles",
           lambda figures: figures["idle"]["share"], at_most=0.03),
    Target("mixed trace, output tokens/s over those of transformers' continuous batching",
           lambda figures: figures["trace"]["output_tokens_per_second"]
           / figures["transformers"]["output_tokens_per_second"], at_least=4.0),
    Target("mixed trace, output tokens/s over vLLM's",
           lambda figures: figures["trace"]["output_tokens_per_second"] / figures["vllm"]["output_tokens_per_second"],
           at_least=1.0),
    Target("seconds until graphs of all sizes are captured, and serving",
           lambda figures: figures["start"]["recorded_seconds"], at_most=20.0),
)


def judged(parts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns every target with its measured value and whether it is met; None where it was not measured."""
    figures: Figures = {}
    for part in parts.values():
        figures |= part.get("figures", {})
    return [_judged(target, figures) for target in TARGETS]


def _judged(target: Target, figures: Figures) -> dict[str, Any]:
    wanted = f"at least {target.at_least:g}" if target.at_least is not None else f"at most {target.at_most:g}"
    try:
        found = target.find(figures)
    except KeyError:
        return {"name": target.name, "wanted": wanted, "found": None, "met": None}
    met = found >= target.at_least if target.at_least is not None else found <= target.at_most
    return {"name": target.name, "wanted": wanted, "found": found, "met": bool(met)}

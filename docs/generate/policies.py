"""What each scheduling policy promises, and what was measured, from `benchmarks/results/policies-cpu.json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.generate.markdown import table
from docs.generate.results import load

Figures = dict[str, Any]
TARGETS = {  # by experiment: each promise, and its target
    "giants": (("Giants next to streams: gaps within 1.25 × `--max-step-ms`.", "99%"),
               ("Giants' mean TTFT against unlimited chunks.", "1.3×")),
    "tiers": (("Two tiers at twice the capacity: premium's p99 TTFT.", "500 ms"),
              ("Premium's p99 TPOT.", "50 ms"),
              ("Bulk's share of what premium leaves.", "0.6")),
    "goodput": (("`deadline` against `fcfs`, which meets 60%: requests within their objectives.", "1.3×"),
                ("The same with shedding.", "1.3×")),
    "shortest": (("`shortest`, predicted lengths: share of an oracle's gain in mean latency.", "0.7 (azure)"),
                 ("Mean latency against `fcfs`.", "1.05× (bursty)"),
                 ("Longest wait, and its bound.", "the bound")),
    "fair": (("`fair`: light tenant's p99 TTFT next to a flood of 20×, against being alone.", "1.5×"),),
}


def _giants(of: Figures) -> tuple[str, ...]:
    return f"{of['within_share']:.0%}", f"{of['ttft_ratio']:.2f}×"


def _tiers(of: Figures) -> tuple[str, ...]:
    return f"{of['ttft_p99'] * 1e3:.0f} ms", f"{of['tpot_p99'] * 1e3:.0f} ms", f"{of['bulk_share']:.2f}"


def _goodput(of: Figures) -> tuple[str, ...]:
    fcfs = (of["fcfs"] + of["fcfs again"]) / 2
    return f"{of['ratio']:.2f}×", f"{of['deadline, shedding'] / fcfs:.2f}×"


def _shortest(of: Figures) -> tuple[str, ...]:
    return (f"{of['share_of_gain']:.2f}", f"{of['predicted'] / of['fcfs']:.2f}×",
            f"{of['longest_wait']:.0f} of {of['bound']:.0f} s")


def _fair(of: Figures) -> tuple[str, ...]:
    return (f"{of['ratio']:.2f}×",)


SHOWN: dict[str, Callable[[Figures], tuple[str, ...]]] = {
    "giants": _giants, "tiers": _tiers, "goodput": _goodput, "shortest": _shortest, "fair": _fair}


def promises() -> str:
    """Returns a line for each promise: what was measured in each world on each workload, and its target."""
    worlds, rows = load("policies-cpu"), []
    for name, targets in TARGETS.items():
        simulated, real = ([SHOWN[name](finding["figures"]) for finding in worlds[world][name]["findings"]]
                           for world in ("simulated", "real"))
        for index, (promise, target) in enumerate(targets):
            cells = [" / ".join(shown[index] for shown in world) for world in (simulated, real)]
            rows.append((promise, *cells, target))
    return table(("promise", "virtual clock: azure / bursty>", "real server: azure / bursty>", "target>"), rows)

"""The table of simulated routers, from `benchmarks/results/routing-simulated*.json`."""

from __future__ import annotations

from docs.generate.markdown import table
from docs.generate.results import load

PROMPTS = {"shared": "60% of it shared with others", "own": "its own"}
NAMES = {"product": "product", "round-robin": "round robin", "power-of-two": "power of two",
         "prefix-aware": "prefix-aware", "least-unfinished": "least unfinished"}


def routers() -> str:
    """Returns the p99 time to the first token of each router, for each load."""
    lines = [line for name in ("routing-simulated", "routing-simulated-64") for line in load(name)["summary"]]
    return table(("replicas>", "a prompt is", "requests/s and replica>", *(f"{name}>" for name in NAMES.values())), [
        (str(line["replicas"]), PROMPTS[line["prefixes"]], f"{line['rate']:g}",
         *(f"{line['ttft_p99'][router] * 1e3:,.0f} ms" if router in line["ttft_p99"] else "–" for router in NAMES))
        for line in lines])

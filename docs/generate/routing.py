"""Tables of several engines: routers, simulated (`benchmarks/results/routing-simulated*.json`) and on Ray
(`routing-ray.json`); prefill and decode apart (`apart-cpu.json`)."""

from __future__ import annotations

from statistics import median
from typing import Any

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


def routers_on_ray() -> str:
    """Returns times to the first token on Ray beside simulated ones: medians of seeds, by load and router."""
    groups: dict[tuple[str, str, float, str], list[dict[str, Any]]] = {}
    for row in load("routing-ray")["rows"]:
        groups.setdefault((row["steps"], row["prefixes"], row["rate"], row["router"]), []).append(row)
    lines = []
    for (steps, kind, rate, router), rows in groups.items():
        ours = groups[steps, kind, rate, "product"]
        times = [_ms(median([row[name] for row in rows])) for name in ("ttft_mean", "ttft_p99")]
        simulated = [_ms(median([row["simulated"][name] for row in rows])) for name in ("ttft_mean", "ttft_p99")]
        ratios = [f"{median([row[name] for row in rows]) / median([row[name] for row in ours]):.2f}"
                  for name in ("ttft_mean", "ttft_p99")]
        lines.append((steps, PROMPTS[kind], f"{rate:g}", router, *times, *ratios, *simulated))
    return table(("steps of", "a prompt is", "requests/s and replica>", "router", "mean>", "p99>",
                  "mean, of product's>", "p99, of product's>", "simulated mean>", "simulated p99>"), lines)


def apart() -> str:
    """Returns the gaps between the steps of a decoding engine, quiet and while giant prompts arrive."""
    found = load("apart-cpu")
    lines = []
    for name, words in (("apart", "prefill apart: an engine for each"), ("one engine", "one engine for both")):
        quiet, giant = found[name]["quiet"], found[name]["giant"]
        lines.append((words, *(f"{gaps[which]:.1f} ms" for which in ("p50_ms", "p99_ms") for gaps in (quiet, giant)),
                      f"{giant['p99_ms'] / quiet['p99_ms']:.2f}", f"{giant['worst_ms']:.1f} ms"))
    return table(("two cores", "p50, quiet>", "p50, giant prompts>", "p99, quiet>", "p99, giant prompts>",
                  "ratio of p99>", "longest>"), lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"

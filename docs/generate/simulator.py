"""The tables of the simulator's page, from `benchmarks/results/*.json`."""

from __future__ import annotations

from docs.generate.markdown import table
from docs.generate.results import load

FIGURES = {
    "ttft_p50": "first token, p50, ms", "ttft_p99": "first token, p99, ms", "itl_p50": "between tokens, p50, ms",
    "itl_p99": "between tokens, p99, ms", "output_throughput": "output tokens/s"}


def validation() -> str:
    """Returns what was predicted and measured of each held-out window, with the spread of its repeats."""
    return table(("case", "requests/s", "seed", "figure", "predicted>", "measured, median>", "error>",
                  "spread of repeats>"), [
        (window["case"], f"{window['rate']:g}", str(window["seed"]), FIGURES[name], *(
            f"{row[which] * (1 if name == 'output_throughput' else 1e3):.1f}" for which in ("predicted", "measured")),
         f"{row['error']:+.0%}", f"{row['spread']:.0%}")
        for window in load("simulator-cpu")["windows"] for name, row in window["figures"].items()])


def speed() -> str:
    """Returns how many requests a second of processor time are simulated."""
    return table(("servers>", "arrivals", "steps", "requests>", "rows of a step>", "requests a CPU second>",
                  "memory at most, MiB>"), [
        (str(row["replicas"]), row["arrivals"], "runs at once" if row["at_once"] else "one by one",
         f"{row['requests']:,}", f"{row['tokens'] / row['steps']:.1f}", f"{row['requests_per_cpu_second']:,.0f}",
         f"{row['peak_mib']:,}") for row in load("simulator-speed-cpu")["rows"]])

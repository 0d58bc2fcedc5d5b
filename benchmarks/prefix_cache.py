"""Measures the prefix cache: one workload with shared system prompts, with and without it, on a real server.

usage: python benchmarks/prefix_cache.py [--model FOLDER] [--rate R] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slotwise.bench.load_generator import BenchTarget, Phrasing, measure, resolve, serving_result
from slotwise.bench.measures import GoodputLimits
from slotwise.bench.server_run import serving
from slotwise.workload.distributions import Prefixes, parse_arrivals, parse_lengths
from slotwise.workload.workloads import Recipe, Workload, generate

SHOWN = ("median_ttft_ms", "p99_ttft_ms", "output_throughput", "median_itl_ms", "p99_itl_ms")


def counter(target: BenchTarget, name: str) -> float:
    """Returns a counter of the server, summed over its labels."""
    key = {"Authorization": f"Bearer {target.api_key}"}
    request = urllib.request.Request(f"{target.base_url}/metrics", headers=key)
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"slotwise:{name}{{"))


def run(model: list[str], switch: str, workload: Workload) -> dict:
    with serving([*model, switch]) as served:
        target, vocab_size = resolve(served.target)
        before = counter(target, "iteration_tokens_total_sum")
        measured = measure(target, workload, Phrasing(vocab_size=vocab_size), num_warmups=2)
        result = serving_result(target, workload, measured, GoodputLimits({}))
        return result | {
            "setting": switch, "computed_tokens": counter(target, "iteration_tokens_total_sum") - before,
            "cached_tokens": counter(target, "prompt_tokens_cached_total")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint's folder (default: the built-in model)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second (default: 8)")
    parser.add_argument("--groups", default="4:384", help="system prompts and their tokens (default: 4:384)")
    parser.add_argument("--num-prompts", type=int, default=120)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    groups, tokens = map(int, asked.groups.split(":"))
    workload = generate(Recipe(
        asked.num_prompts, parse_lengths("lognormal:48:0.6:128"), parse_lengths("lognormal:32:0.6:96"),
        parse_arrivals(f"poisson:{asked.rate}"), Prefixes(groups, tokens)), seed=1)
    model = [asked.model] if asked.model else []
    results = [run(model, switch, workload) for switch in ("--no-enable-prefix-caching", "--enable-prefix-caching")]
    table = Table("", *(result["setting"] for result in results))
    for name in (*SHOWN, "computed_tokens", "cached_tokens"):
        table.add_row(name.replace("_", " "), *(f"{result[name]:,.1f}" for result in results))
    Console().print(table)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""First tokens and gaps of streams on a real server: two checkouts in turn, or one with several `--max-stall-ms`.

usage: python -m benchmarks.first_tokens MODEL [--checkout OTHER] [--stall-ms 70 300 0] [--seeds 91] [--json FILE]

Four workloads, every request a stream, with prompts of random ids:

    burst     64 requests at once with log-normal lengths, the mixed trace (peers/same_requests.py)
    prompts   the same prompts with one output token each: no step decodes, so a burst can at best reach its median
    steady    the same lengths, `--rate` arrivals per second: many streams, and few requests that wait
    long      four prompts of 1,900 tokens next to eight streams

The figures are the median and the slowest first token in seconds, output tokens per second, and the longest gap of a
stream in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import parser_of
from benchmarks.pairs import HERE, OPTIONS, STALLS, served
from benchmarks.peers.same_requests import SHAPES, workload
from rich.console import Console
from rich.table import Table

from slotwise.measure.bench.load_generator import BenchTarget, Phrasing, measure, resolve
from slotwise.measure.bench.results import commit, environment, write_json
from slotwise.measure.workload.distributions import Poisson, parse_lengths
from slotwise.measure.workload.workloads import Recipe, Workload, generate

WORKLOADS = ("burst", "prompts", "steady", "long")
FIGURES = ("first_token", "slowest", "tokens_per_second", "gap_ms")


class Variant(NamedTuple):
    """A version of the server with its stall limit."""

    name: str
    checkout: Path
    stall_ms: float


def workloads(names: list[str], seed: int, requests: int, rate: float) -> Iterator[tuple[str, Workload]]:
    burst = workload(f"mixed:{seed}", requests)
    inputs, outputs = SHAPES["mixed"]
    steady = Recipe(requests, parse_lengths(inputs), parse_lengths(outputs), Poisson(rate))
    prompts = replace(burst, requests=tuple(replace(one, num_output=1) for one in burst.requests))
    found = {"burst": burst, "prompts": prompts, "steady": generate(steady, seed), "long": STALLS}
    return ((name, found[name]) for name in names)


def figures(target: BenchTarget, load: Workload) -> dict[str, float]:
    """Sends a workload, and returns its figures.  Raises RuntimeError if a request failed."""
    target, vocab_size = resolve(target)
    measured = measure(target, load, Phrasing(vocab_size=vocab_size), num_warmups=4)
    if failed := [one.error for one in measured.outcomes if one.error]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    waits = [one.ttft for one in measured.outcomes]
    return {"first_token": statistics.median(waits), "slowest": max(waits),
            "tokens_per_second": sum(one.num_output for one in measured.outcomes) / measured.duration,
            "gap_ms": 1e3 * max(max(one.itls, default=0.0) for one in measured.outcomes)}


def measured(variants: list[Variant], asked: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Returns the figures of each seed, by workload and variant; variants take turns in going first."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for turn, seed in enumerate(asked.seeds):
        for variant in variants[:: 1 if turn % 2 == 0 else -1]:
            arguments = [asked.model, *OPTIONS, "--max-stall-ms", f"{variant.stall_ms:g}"]
            with served(variant.checkout / "src", arguments) as target:
                for name, load in workloads(asked.only, seed, asked.requests, asked.rate):
                    found.setdefault(name, {}).setdefault(variant.name, []).append(figures(target, load))
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--checkout", type=Path, help="the other version")
    parser.add_argument("--stall-ms", type=float, nargs="+", default=[70.0], help="stall limits; 0: none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[91], help="of the workloads")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="workloads")
    parser.add_argument("--requests", type=int, default=64, help="of each workload but `long`")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals per second of `steady`")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    asked.model = str(Path(asked.model).resolve())
    checkouts = {"this": HERE} | ({"other": asked.checkout.resolve()} if asked.checkout else {})
    variants = [Variant(f"{name} {stall:g}", checkout, stall)
                for name, checkout in checkouts.items() for stall in asked.stall_ms]
    found = measured(variants, asked)
    table = Table("workload", "version, stall ms", *FIGURES)
    for load, runs in found.items():
        for name, each in runs.items():
            table.add_row(load, name, *(" ".join(f"{one[figure]:,.4g}" for one in each) for figure in FIGURES))
    Console(width=200).print(table)
    if asked.json:
        commits = {version: commit(checkout) for version, checkout in checkouts.items()}
        write_json(asked.json, {"environment": environment(), "model": Path(asked.model).name, "seeds": asked.seeds,
                                "requests": asked.requests, "rate": asked.rate, "commits": commits, "figures": found})


if __name__ == "__main__":
    main()

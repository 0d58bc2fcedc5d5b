"""Compares two checkouts in interleaved pairs: the mixed trace offline and over HTTP, stalls, start-up.

usage: python -m benchmarks.pairs CHECKOUT MODEL [--pairs 10] [--requests 64] [--only offline server] [--json FILE]

Every run is a process of its own with nothing beside it, and pairs alternate which version runs first, so that a slow
minute slows both.  A ratio above 1 means that this checkout is better; its interval is that of the mean of the
logarithms, by resampling.

    offline    output tokens per second of 64 requests with log-normal lengths, all at once (peers/run_slotwise.py)
    http       the same over HTTP, every request a stream
    gap        the longest gap of eight streams when four prompts of 1,900 tokens arrive, ms
    start      from the command to "Ready", seconds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.commands import parser_of
from benchmarks.peers.same_requests import workload
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slotwise.measure.bench.load_generator import BenchTarget, Phrasing, measure, resolve, serving_result
from slotwise.measure.bench.measures import GoodputLimits
from slotwise.measure.bench.results import commit, environment, write_json
from slotwise.measure.bench.server_run import serving
from slotwise.measure.workload.workloads import Workload, as_workload

HERE = Path(__file__).parents[1]
OPTIONS = ("--dtype", "bfloat16", "--max-num-seqs", "64", "--max-model-len", "2048", "--no-enable-prefix-caching")
STALLS = as_workload([(0.0, 32, 160)] * 8 + [(1.0, 1900, 4)] * 4)
FEWER_IS_BETTER = ("gap", "start")
RESAMPLES = 10_000

Figures = dict[str, float]
Run = Callable[[Path, str, int, int], Figures]


@contextlib.contextmanager
def served(source: Path, arguments: list[str]) -> Iterator[BenchTarget]:
    """Yields a server of the version in `source`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source)
    with serving(arguments) as server:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        yield server.target


def load(target: BenchTarget, workload: Workload) -> tuple[float, float]:
    """Returns output tokens per second, and the longest gap in a stream in milliseconds."""
    target, vocab_size = resolve(target)
    result = serving_result(
        target, workload, measure(target, workload, Phrasing(vocab_size=vocab_size), num_warmups=4), GoodputLimits({}))
    return float(result["output_throughput"]), 1000 * max(max(gaps, default=0.0) for gaps in result["itls"])


def offline(checkout: Path, model: str, requests: int, seed: int) -> Figures:
    command = [sys.executable, str(HERE / "benchmarks" / "peers" / "run_slotwise.py"), model,
               "--requests", str(requests), "--measures", f"mixed:{seed}"]
    variables = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return {"offline": json.loads(done.stdout.splitlines()[-1])["value"]}


def server(checkout: Path, model: str, requests: int, seed: int) -> Figures:
    began = time.perf_counter()
    with served(checkout / "src", [model, *OPTIONS]) as target:
        ready = time.perf_counter() - began
        rate, _ = load(target, workload(f"mixed:{seed}", requests))
        _, gap = load(target, STALLS)
    return {"http": rate, "gap": gap, "start": ready}


RUNS: dict[str, Run] = {"offline": offline, "server": server}


def interval(ratios: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Returns the geometric mean of ratios, and the ends of its 95% interval."""
    logs, rng = [math.log(ratio) for ratio in ratios], random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    ends = means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]
    return math.exp(statistics.fmean(logs)), math.exp(ends[0]), math.exp(ends[1])


def measured(checkouts: dict[str, Path], asked: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Returns the figures of all runs, by figure and version."""
    found: dict[str, dict[str, list[float]]] = {}
    turns = [(pair, name) for name in asked.only for pair in range(asked.pairs)]
    for pair, name in track(turns, "pairs", console=Console(stderr=True)):
        for version in list(checkouts)[:: 1 if pair % 2 else -1]:
            for figure, value in RUNS[name](checkouts[version], asked.model, asked.requests, pair).items():
                found.setdefault(figure, {}).setdefault(version, []).append(value)
    return found


def ratios(figure: str, runs: dict[str, list[float]]) -> list[float]:
    better = -1 if figure in FEWER_IS_BETTER else 1
    return [(this / other) ** better for this, other in zip(runs["this"], runs["other"], strict=True)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path, help="the other version")
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--pairs", type=int, default=10, help="of each kind")
    parser.add_argument("--requests", type=int, default=64, help="of the mixed trace")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="kinds of run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    asked.model = str(Path(asked.model).resolve())
    checkouts = {"this": HERE, "other": asked.checkout.resolve()}
    found = measured(checkouts, asked)
    table = Table("figure", "other, median", "this, median", "ratio", "95% interval")
    rows = {}
    for figure, runs in found.items():
        ratio, low, high = interval(ratios(figure, runs))
        rows[figure] = {"ratio": ratio, "interval": [low, high], **runs}
        table.add_row(figure, *(f"{statistics.median(runs[version]):,.2f}" for version in ("other", "this")),
                      f"{ratio:.3f}", f"{low:.3f} to {high:.3f}")
    Console().print(table)
    if asked.json:
        commits = {version: commit(checkout) for version, checkout in checkouts.items()}
        write_json(asked.json, {"environment": environment(), "model": Path(asked.model).name,
                                "requests": asked.requests, "commits": commits, "figures": rows})


if __name__ == "__main__":
    main()

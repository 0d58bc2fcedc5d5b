"""Measures the cost of busy programs on the same cores: throughput over HTTP and the longest gap of a stream.

usage: python benchmarks/neighbours.py [--beside SRC] [--model FOLDER] [--busy 0 1 2] [--rounds 4]
                                         [--prompts LENGTHS] [--json FILE]

The server, its clients and --busy programs that never sleep share this machine.  To compare with another version give
the `src` of its checkout: both servers run side by side and are loaded in turn, so that a slow minute slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import slotwise
from slotwise.bench.load_generator import BenchTarget, Phrasing, measure, resolve, serving_result
from slotwise.bench.measures import GoodputLimits
from slotwise.bench.results import commit, environment, workload_facts, write_json
from slotwise.bench.server_run import serving
from slotwise.workload.distributions import parse_arrivals, parse_lengths
from slotwise.workload.workloads import Recipe, Workload, generate

SLOTS = 16
HERE = Path(slotwise.__file__).parents[1]
RESTLESS = [sys.executable, "-c", "while True: pass"]


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


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Runs `number` programs that never sleep."""
    programs = [subprocess.Popen(RESTLESS) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def load(target: BenchTarget, workload: Workload) -> tuple[float, float]:
    """Returns output tokens per second, and the longest gap in a stream in milliseconds."""
    target, vocab_size = resolve(target)
    result = serving_result(
        target, workload, measure(target, workload, Phrasing(vocab_size=vocab_size), num_warmups=4), GoodputLimits({}))
    return float(result["output_throughput"]), 1000 * max(max(gaps, default=0.0) for gaps in result["itls"])


def compare(
    targets: dict[str, BenchTarget], workload: Workload, numbers: list[int], rounds: int) -> list[dict[str, object]]:
    """Returns the results of each run, by version and number of busy programs."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    turns = [(turn, number) for number in numbers for turn in range(rounds)]
    for turn, number in track(turns, "neighbours", console=Console(stderr=True)):
        for name in list(targets)[:: 1 if turn % 2 else -1]:
            with busy(number):
                found.setdefault((name, number), []).append(load(targets[name], workload))
    return [
        {"version": name, "busy": number, "tokens_per_second": [rate for rate, _ in runs],
         "longest_gap_ms": [gap for _, gap in runs]} for (name, number), runs in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, metavar="SRC", help="another version's source, to compare with")
    parser.add_argument("--model", help="a checkpoint's folder (default: the built-in model)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="programs beside it (default: 0 1 2)")
    parser.add_argument("--prompts", default="lognormal:64:0.8:256", metavar="LENGTHS",
                        help="their tokens, as slotwise bench takes them (default: lognormal:64:0.8:256)")
    parser.add_argument("--num-prompts", type=int, default=192, help="requests of a run (default: 192)")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each (default: 4)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    workload = generate(Recipe(
        asked.num_prompts, parse_lengths(asked.prompts), parse_lengths("lognormal:64:0.8:256"),
        parse_arrivals(f"closed:{SLOTS}")), seed=1)
    sources = {"this": HERE} | ({"other": asked.beside.resolve()} if asked.beside else {})
    arguments = [*([asked.model] if asked.model else []), "--max-num-seqs", str(SLOTS)]
    with contextlib.ExitStack() as stack:
        targets = {name: stack.enter_context(served(source, arguments)) for name, source in sources.items()}
        for target in targets.values():
            load(target, workload)
        figures = compare(targets, workload, asked.busy, asked.rounds)
    table = Table("version", "busy programs", "output tokens/s", "longest gap, ms")
    for row in figures:
        rates, gaps = row["tokens_per_second"], row["longest_gap_ms"]
        table.add_row(str(row["version"]), str(row["busy"]), f"{statistics.median(rates):,.0f}",
                      f"{statistics.median(gaps):,.0f}")
    Console().print(table)
    if asked.json:
        write_json(asked.json, {
            "environment": environment(), "workload": workload_facts(workload), "slots": SLOTS,
            "commits": {name: commit(source.parent) for name, source in sources.items()}, "runs": figures})


if __name__ == "__main__":
    main()

"""Measures the cost of observers: throughput with event log, metrics and a subscriber, against none of them.

usage: python -m benchmarks.overheads observers [--model FOLDER] [--slots 16] [--pairs 7] [--json FILE]

One server is loaded repeatedly, in turn with its observers and without them: two servers differ by more than the
effect measured here.  With observers it writes its log to a file and streams it to a viewer in a process of its own,
which also reads the metrics every five seconds.
"""

from __future__ import annotations

import contextlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.commands import bar, parser_of
from rich.console import Console
from rich.table import Table

from slotwise.measure.bench.load_generator import BenchTarget, Phrasing, measure, resolve, serving_result
from slotwise.measure.bench.measures import GoodputLimits
from slotwise.measure.bench.results import environment, workload_facts, write_json
from slotwise.measure.bench.server_run import NO_QUEUE_BOUND
from slotwise.measure.workload.distributions import parse_arrivals, parse_lengths
from slotwise.measure.workload.workloads import Recipe, Workload, generate

READY = re.compile(r"Ready after .* on (http://\S+)")
MYSELF = (sys.executable, "-m", "benchmarks.overheads.observers")
SERVE, VIEW = "serve", "view"  # roles of this program in child processes
SCRAPED_EVERY = 5.0  # seconds; 15 and 60 are common
BARE, OBSERVED = signal.SIGUSR1, signal.SIGUSR2
SETTLED = 1.0  # seconds after a signal, after which all ended requests have been published
Figures = dict[str, list[float]]


def serve(arguments: list[str]) -> int:
    """Runs `slotwise serve`; one signal removes all observers but admission control, another restores them."""
    from slotwise.cli import main
    from slotwise.compose import api_server as service

    whole = service.build_api

    def build_api(*given: Any) -> Any:
        api = whole(*given)
        engine_client, admission_control = api.engine.client, api.limits.admission_control
        everyone = list(engine_client.observers)

        def observe(number: int, _: object) -> None:
            engine_client.observers[:] = everyone if number == OBSERVED else [admission_control]

        for number in (BARE, OBSERVED):
            signal.signal(number, observe)
        return api

    service.build_api = build_api
    return main(["serve", *arguments])


def view(url: str) -> None:
    """Reads all events, and the metrics at intervals, until the server ends."""

    def scrape() -> None:
        with contextlib.suppress(OSError):
            while True:
                urllib.request.urlopen(f"{url}/metrics", timeout=30).read()
                time.sleep(SCRAPED_EVERY)

    threading.Thread(target=scrape, daemon=True).start()
    with urllib.request.urlopen(f"{url}/events", timeout=3600) as response:
        print(len(response.read1(1 << 20)), flush=True)
        while response.read1(1 << 20):
            pass


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a ready server and its address."""
    with subprocess.Popen(
            [*MYSELF, SERVE, "--port", "0", *NO_QUEUE_BOUND, *arguments], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := READY.search(line):
                    yield process, found[1]
                    return
            raise RuntimeError("the server ended before it was ready")
        finally:
            process.terminate()


@contextlib.contextmanager
def viewing(url: str) -> Iterator[None]:
    """Runs a viewer that has received its first entry: starting a process costs more than viewing."""
    with subprocess.Popen([*MYSELF, VIEW, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(SETTLED)
            yield
        finally:
            process.terminate()


def throughput(url: str, workload: Workload) -> float:
    """Returns output tokens per second, as clients see them."""
    target, vocab_size = resolve(BenchTarget(url))
    measured = measure(target, workload, Phrasing(vocab_size=vocab_size), num_warmups=4)
    return float(serving_result(target, workload, measured, GoodputLimits({}))["output_throughput"])


def compare(arguments: list[str], workload: Workload, pairs: int) -> tuple[Figures, int]:
    """Returns tokens per second of each run, and the bytes of their log."""
    figures: Figures = {"bare": [], "observed": []}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(["--event-log", str(log), *arguments]) as (process, url):
            throughput(url, workload)
            for pair in bar(range(pairs), "pairs"):
                for name in ("bare", "observed")[:: 1 if pair % 2 else -1]:
                    process.send_signal(OBSERVED if name == "observed" else BARE)
                    time.sleep(SETTLED)
                    with viewing(url) if name == "observed" else contextlib.nullcontext():
                        figures[name].append(throughput(url, workload))
                    time.sleep(SETTLED)
        return figures, log.stat().st_size


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a checkpoint's folder")
    parser.add_argument("--slots", type=int, default=16, help="and as many users")
    parser.add_argument("--num-prompts", type=int, default=384, help="requests of a run")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    asked = parser.parse_args()
    workload = generate(Recipe(
        asked.num_prompts, parse_lengths("lognormal:64:0.8:256"), parse_lengths("lognormal:64:0.8:256"),
        parse_arrivals(f"closed:{asked.slots}")), seed=1)
    model = [asked.model] if asked.model else []
    figures, size = compare([*model, "--max-num-seqs", str(asked.slots)], workload, asked.pairs)
    ratios = [observed / bare for bare, observed in zip(figures["bare"], figures["observed"], strict=True)]
    table = Table("", "median", "least", "most")
    for name, values in (*figures.items(), ("observed / bare", ratios)):
        digits = 3 if values is ratios else 1
        table.add_row(name, *(f"{value:,.{digits}f}" for value in (
            statistics.median(values), min(values), max(values))))
    Console().print(table)
    if asked.json:
        write_json(asked.json, {
            "environment": environment(), "workload": workload_facts(workload), "slots": asked.slots,
            "output_tokens_per_second": figures, "ratios": ratios, "median_ratio": statistics.median(ratios),
            "log_bytes": size})


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        sys.exit(serve(sys.argv[2:]))
    if sys.argv[1:2] == [VIEW]:
        view(sys.argv[2])
    else:
        main()

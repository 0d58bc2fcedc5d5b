"""Predicted beside measured: a real server over HTTP, and the simulator fed by the log of a window before.

    fitted window ──► event log ──► slotwise.simulate ──► predicted figures of each held-out window
    held-out windows, each several times ──► measured figures, and their own spread

Lengths are those of a trace, scaled; arrivals are Poisson.  Measured times are the client's.

usage: python -m benchmarks.simulator MODEL --trace CSV --json FILE       (about five minutes; nothing else may run)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.server import serving

from slotwise.bench.client import Phrasing, Target
from slotwise.bench.measures import COMPLETED, Outcome
from slotwise.bench.results import environment, write_json
from slotwise.bench.serving import measure, resolve
from slotwise.observe.event_log import read_file
from slotwise.simulate.figures import Figures, figures
from slotwise.simulate.recorded import read_recording
from slotwise.simulate.simulator import Server, SimulatedRequest, simulate
from slotwise.simulate.traffic import traffic_of
from slotwise.workload.arrivals import Poisson
from slotwise.workload.requests import Workload
from slotwise.workload.trace import read_trace, replay

COMPARED = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "output_throughput")
FIT_SEED = 1


def window(trace: Path, scale: float, rate: float, seconds: float, seed: int) -> Workload:
    """Returns requests of the trace, different ones for each seed, that arrive at `rate` a second."""
    count = max(1, round(rate * seconds))
    read = read_trace(trace, scale, limit=(seed + 1) * count)
    part = type(read)(read.name, read.times[-count:], read.lengths[-count:], scale)
    return replay(part, Poisson(rate), seed=seed)


def seen(outcomes: Sequence[Outcome]) -> Figures:
    """Returns the figures of what clients measured."""
    failed = [outcome for outcome in outcomes if outcome.status != COMPLETED]
    if failed:
        raise RuntimeError(f"{len(failed)} requests were not served: {failed[0].error}")
    return figures([SimulatedRequest(one.sent, list(one.token_times), one.ended, "length") for one in outcomes])


def measured(target: Target, vocab_size: int, workload: Workload) -> Figures:
    return seen(measure(target, workload, Phrasing(vocab_size, hidden_lengths=True), num_warmups=2).outcomes)


def compared(predicted: Figures, runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Returns each figure predicted and measured (median of the runs), the error, and the runs' spread; relative."""
    table = {}
    for name in COMPARED:
        values = [getattr(run, name) for run in runs]
        middle = statistics.median(values)
        table[name] = {
            "predicted": getattr(predicted, name), "measured": middle,
            "error": getattr(predicted, name) / middle - 1, "spread": (max(values) - min(values)) / middle}
    return table


def run(asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, serving(
            asked.model, "--event-log", f"{folder}/log", "--speculative-config", '{"method": "none"}') as server:
        target, vocab_size = resolve(Target(server.url))
        measured(target, vocab_size, window(asked.trace, asked.scale, asked.rates[-1], asked.seconds, FIT_SEED))
        fitted = Path(folder, "log").read_bytes()
        windows = {rate: window(asked.trace, asked.scale, rate, asked.seconds, FIT_SEED + 1 + index)
                   for index, rate in enumerate(asked.rates)}
        runs: dict[float, list[Figures]] = {rate: [] for rate in asked.rates}
        for _ in range(asked.repeats):
            for rate, workload in windows.items():
                runs[rate].append(measured(target, vocab_size, workload))
        Path(folder, "fitted").write_bytes(fitted)
        setup, _ = read_recording(read_file(f"{folder}/fitted"))
    return {
        "version": 1, "environment": environment(), "trace": asked.trace.name, "length_scale": asked.scale,
        "seconds": asked.seconds, "repeats": asked.repeats, "pause_ms": setup.pace.between() * 1e3,
        "windows": [{
            "rate": rate, "seed": workload.seed, "requests": len(workload.requests),
            "figures": compared(figures(list(simulate(traffic_of(workload), [Server(setup)]).values())), runs[rate])}
            for rate, workload in windows.items()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=0.125)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 6.0])
    parser.add_argument("--seconds", type=float, default=28.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    result = run(asked)
    write_json(asked.json, result)
    for one in result["windows"]:
        print(f"{one['rate']:g} requests/s, seed {one['seed']}, {one['requests']} requests")
        for name, row in one["figures"].items():
            print(f"  {name:18} predicted {row['predicted']:9.4f}  measured {row['measured']:9.4f}  "
                  f"error {row['error']:+7.1%}  spread {row['spread']:6.1%}")


if __name__ == "__main__":
    main()

"""How fast the simulator is: requests a second of processor time on the Azure conversation trace, 64 slots a server.

    one server       at the trace's own times, and at a rate that fills its slots; runs of steps at once, and each step
    many servers     at as many times the trace's rate, with the memory that the process held at most

The machine is an H100 by its data sheet with the shape of an 8-billion-weight Llama: what a simulated step costs does
not depend on it.

usage: python -m benchmarks.simulator speed --trace CSV --json FILE       (two minutes of one core)
       python -m benchmarks.simulator speed --trace CSV --json FILE --add --requests 0 --fleet-requests 1000000
"""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.commands import bar, parser_of

from slotwise.engine.config import EngineConfig
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.simulate.figures import figures
from slotwise.measure.simulate.machines import ModelShape, setup_of
from slotwise.measure.simulate.simulator import Server, Setup, simulate, traffic_of
from slotwise.measure.workload.distributions import Arrivals, Poisson, TraceTimes
from slotwise.measure.workload.trace import Trace, read_trace, replay

SHAPE = ModelShape(
    weight_bytes=16_060_000_000, position_bytes=131_072, token_weights=7_000_000_000, head_weights=525_000_000,
    pair_operations=4 * 32 * 32 * 128, max_model_len=16_384)
SLOTS = 64
STEP_TOKENS = 2048  # a prompt of the trace has 1,155 on average
FULL = 25.0  # requests a second that fill the slots of one server
OWN = 5.4  # requests a second of the trace


def repeated(trace: Trace, number: int) -> Trace:
    """Returns `number` requests of a trace, which begins again where it ends; its times are of no use then."""
    return replace(trace, lengths=tuple(islice(cycle(trace.lengths), number)))


def run(trace: Trace, arrivals: Arrivals, setup: Setup, replicas: int, *, takes_runs: bool) -> dict[str, Any]:
    """Simulates the requests of a trace.  Returns what it took, figures included."""
    workload = replay(trace, arrivals, seed=1)
    began, started = time.process_time(), time.monotonic()
    servers = [Server(setup, replica=number, takes_runs=takes_runs) for number in range(replicas)]
    requests = list(simulate(traffic_of(workload), servers).values())
    found = figures(requests)
    seconds = time.process_time() - began
    steps, tokens = sum(len(server.clock) for server in servers), sum(one.num_tokens for one in requests)
    return {
        "replicas": replicas, "arrivals": str(arrivals), "at_once": takes_runs, "requests": found.requests,
        "served": found.served, "tokens": tokens, "steps": steps, "cpu_seconds": seconds,
        "seconds": time.monotonic() - started,
        "requests_per_cpu_second": len(requests) / seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="the Azure conversation trace, or another CSV")
    parser.add_argument("--requests", type=int, default=3000, help="of one server; 0: none is simulated alone")
    parser.add_argument("--replicas", type=int, default=100, help="replicas of a fleet")
    parser.add_argument("--fleet-requests", type=int, default=19_366, help="requests of many servers; 0: none")
    parser.add_argument("--add", action="store_true", help="to the rows that the file has")
    parser.add_argument("--json", required=True, help="write the figures here")
    asked = parser.parse_args()
    setup = setup_of("h100", SHAPE, EngineConfig.of(model="", max_num_seqs=SLOTS, max_num_batched_tokens=STEP_TOKENS))
    few, whole = read_trace(asked.trace, limit=max(1, asked.requests)), read_trace(asked.trace)
    kinds = [(arrivals, at_once) for arrivals in (TraceTimes(), Poisson(FULL)) for at_once in (False, True)]
    rows = [run(few, arrivals, setup, 1, takes_runs=at_once)
            for arrivals, at_once in bar(kinds if asked.requests else [], "one server")]
    if asked.fleet_requests:
        many = repeated(whole, asked.fleet_requests)
        rows.append(run(many, Poisson(OWN * asked.replicas), setup, asked.replicas, takes_runs=True))
    if asked.add:
        rows = json.loads(Path(asked.json).read_text())["rows"] + rows
    write_json(asked.json, {"version": 1, "environment": environment(), "trace": asked.trace.name, "slots": SLOTS,
                            "rows": rows})
    for row in rows:
        how = "runs at once" if row["at_once"] else "each step"
        print(f"{row['replicas']:4} servers, {row['arrivals']:12} {how:13} {row['requests_per_cpu_second']:7,.0f} "
              f"requests a CPU second, {row['steps']:,} steps, {row['peak_mib']:,} MiB")

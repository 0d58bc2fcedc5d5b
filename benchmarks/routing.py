"""Routers compared in simulation: arrivals and lengths of a trace, with prefixes synthesised, on 4 and on 64 replicas.

    trace ──► window of requests ──► prefixes: the first part of a prompt is that of its group (Zipf)
          └─► arrivals at the trace's own gaps, scaled to a share of what the replicas compute

Everything but time is the server's own: scheduler, prefix cache, admission control, and the router with what replicas
tell it.  Times are those of a data sheet (docs/simulator.md), and nothing was measured.

usage: python -m benchmarks.routing --trace CSV --json FILE [--replicas 4] [--requests 4000] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands import parser_of

from slotwise.core.routing.routers import ROUTERS
from slotwise.engine.config import EngineConfig
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.simulate.figures import figures
from slotwise.measure.simulate.machines import ModelShape, setup_of
from slotwise.measure.simulate.simulated_routing import RoutedServers
from slotwise.measure.simulate.simulator import Server, Setup, simulate, traffic_of
from slotwise.measure.workload.distributions import Poisson
from slotwise.measure.workload.trace import read_trace, replay
from slotwise.measure.workload.workloads import Workload

MACHINE = "h100"
SHAPE = ModelShape(  # Llama 3.1 8B in bfloat16
    weight_bytes=15_000_000_000, position_bytes=131_072, token_weights=6_980_000_000, head_weights=525_000_000,
    pair_operations=524_288, max_model_len=8192)
CACHE_TOKENS = 200_000  # of a replica: less than the prefixes need together
SHARED = 0.6  # of a prompt, where prefixes are shared
GROUPS = 200  # prefixes, drawn by Zipf's law
LOADS = ("shared:14", "shared:18", "shared:22", "own:10", "own:14")  # prompts; requests a second and replica
ROUTERS_COMPARED = ("product", "least-unfinished", "round-robin", "power-of-two", "prefix-aware")


def with_prefixes(workload: Workload, share: float, groups: int, seed: int) -> Workload:
    """Returns the workload with the first `share` of each prompt taken from a group's prefix."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(groups)]
    drawn = rng.choices(range(groups), weights, k=len(workload.requests))
    return replace(workload, requests=tuple([
        replace(one, prefix=group, num_prefix=int(one.num_prompt * share)) if int(one.num_prompt * share) else one
        for one, group in zip(workload.requests, drawn, strict=True)]))


def window(trace: Path, number: int, rate: float, seed: int, length_scale: float = 1.0) -> Workload:
    """Returns `number` requests of the trace, other ones for each seed, that arrive at `rate` a second."""
    read = read_trace(trace, length_scale)
    first = (seed - 1) * number % max(1, len(read.times) - number)
    part = replace(read, times=read.times[first : first + number], lengths=read.lengths[first : first + number])
    return replay(part, Poisson(rate), seed=seed)


def setup() -> Setup:
    found = setup_of(MACHINE, SHAPE, EngineConfig.of(model="", max_num_seqs=64))
    limits = replace(found.limits, num_blocks=CACHE_TOKENS // found.limits.block_size)
    return replace(found, limits=limits)


def served(workload: Workload, replicas: int, router: str, given: Setup) -> dict[str, float]:
    """Returns the figures of a workload on replicas behind a router."""
    routed = RoutedServers(ROUTERS[router](0), replicas, given.pace)
    servers = [Server(given, observers=[told], replica=number) for number, told in enumerate(routed.observers)]
    requests = list(simulate(traffic_of(workload), servers, routed=routed).values())
    firsts = [one.ttft for one in requests if one.ttft is not None]
    found = figures(requests).as_json()
    return found | {"ttft_mean": statistics.fmean(firsts), "unanswered": len(requests) - len(firsts)}


def load_of(text: str) -> tuple[str, float]:
    """Returns which prefixes prompts have, and requests a second and replica.  Raises ValueError: neither."""
    kind, _, rate = text.partition(":")
    if kind not in ("shared", "own"):
        raise ValueError(f"{text}: must be shared:RATE or own:RATE")
    return kind, float(rate)


def compared(asked: argparse.Namespace, replicas: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each load, seed and router."""
    for kind, rate in asked.loads:
        for seed in asked.seeds:
            workload = window(asked.trace, asked.requests, rate * replicas, seed)
            if kind == "shared":
                workload = with_prefixes(workload, SHARED, GROUPS, seed)
            for router in ROUTERS_COMPARED:
                began = time.process_time()
                found = served(workload, replicas, router, setup())
                yield {"replicas": replicas, "prefixes": kind, "rate": rate, "seed": seed, "router": router, **found,
                       "cpu_seconds": round(time.process_time() - began, 1)}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each load the medians over seeds of the first token's mean and p99, by router."""
    found = []
    for load in dict.fromkeys(map(_load, rows)):
        line: dict[str, Any] = dict(zip(("replicas", "prefixes", "rate"), load, strict=True))
        for name in ("ttft_mean", "ttft_p99"):
            values: dict[str, list[float]] = {}
            for row in rows:
                if _load(row) == load:
                    values.setdefault(row["router"], []).append(row[name])
            line[name] = {router: round(statistics.median(some), 4) for router, some in values.items()}
        found.append(line)
    return found


def _load(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["replicas"], row["prefixes"], row["rate"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="the Azure conversation trace, or another CSV")
    parser.add_argument("--json", required=True, help="rows that it has already are kept")
    parser.add_argument("--loads", nargs="+", type=load_of, default=[load_of(one) for one in LOADS],
                        help="shared:RATE or own:RATE, prompts' prefixes and requests a second and replica")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64], help="replicas of a fleet")
    parser.add_argument("--requests", type=int, default=4000, help="requests of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the drawn prefixes and arrivals")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(Path(asked.json).read_text())["rows"] if Path(asked.json).exists() else []
    for replicas in asked.replicas:
        for row in compared(asked, replicas):
            rows.append(row)
            print({name: row[name] for name in ("replicas", "prefixes", "rate", "seed", "router", "ttft_mean",
                                                "ttft_p99")}, flush=True)
            write_json(asked.json, {"version": 1, "environment": environment(), "machine": MACHINE,
                                    "requests": asked.requests, "shared": SHARED, "groups": GROUPS,
                                    "cache_tokens": CACHE_TOKENS, "summary": summary(rows), "rows": rows})
    for line in summary(rows):
        print(line)


if __name__ == "__main__":
    main()

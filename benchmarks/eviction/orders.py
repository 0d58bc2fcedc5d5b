"""Orders of eviction compared in simulation, on three kinds of traffic, next to a bound from hindsight.

    conversations   a window of Mooncake's trace: its times, and a hash for each 512 tokens of a prompt
    agents          tool calls with pauses, sub-agents and compaction, drawn from a seed
    prefixes        requests of groups with a system prompt each, drawn from a seed

Scheduler, prefix cache and orders are the server's; times are those of a data sheet (docs/simulator.md).  Each cache
has a share of the blocks that the traffic needs altogether.

usage: python -m benchmarks.eviction orders --trace JSONL --json FILE [--minutes 10] [--seeds 1 2] [--shares 0.125 0.5]

Other rows of the file are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands import bar, parser_of
from benchmarks.routing import SHAPE

from slotwise.core.scheduler_limits import EVICTION_POLICIES
from slotwise.engine.config import EngineConfig
from slotwise.measure.bench.results import environment, write_json
from slotwise.measure.simulate.eviction_replay import compare, working_set
from slotwise.measure.simulate.machines import BLOCK, setup_of
from slotwise.measure.simulate.simulator import Setup
from slotwise.measure.workload.sessions import AGENTS, PREFIXES, sessions_of

MACHINE, LONGEST = "h100", 131_072
CONVERSATIONS = "conversations"
RANKS = {CONVERSATIONS: 4, AGENTS: 1, PREFIXES: 1}  # GPUs, so that the traffic is below what they compute
QUEUED = (1 << 20, 1 << 40)  # requests and tokens that may wait: more than any traffic has


def setup_for(kind: str, num_blocks: int) -> Setup:
    config = EngineConfig(model="simulated", max_num_seqs=128, max_num_batched_tokens=4096,
                          tensor_parallel_size=RANKS[kind], enable_prefix_caching=True)
    setup = setup_of(MACHINE, replace(SHAPE, max_model_len=LONGEST), config)
    blocks = max(num_blocks, 2 * LONGEST // BLOCK)
    return replace(setup, limits=replace(setup.limits, num_blocks=blocks, watermark_blocks=blocks // 100),
                   max_queued=QUEUED)


def measure(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind of traffic, seed and share."""
    for kind in bar(asked.traffic, "traffic"):
        for seed in asked.seeds if kind != CONVERSATIONS else asked.seeds[:1]:
            sessions = sessions_of(str(asked.trace) if kind == CONVERSATIONS else kind, asked.minutes, seed)
            needed = working_set(sessions, BLOCK)
            for share in asked.shares:
                setup = setup_for(kind, int(needed * share))
                began = time.perf_counter()
                found = compare(sessions, setup, asked.policies)
                yield {"traffic": kind, "seed": seed, "share": share, "blocks": setup.limits.num_blocks,
                       "needed_blocks": needed, "sessions": len(sessions),
                       "requests": sum(len(one.turns) for one in sessions), "minutes": asked.minutes,
                       "seconds": time.perf_counter() - began, "found": found}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's trace of conversations")
    parser.add_argument("--json", type=Path, required=True, help="write the result here")
    parser.add_argument("--traffic", nargs="+", choices=tuple(RANKS), default=tuple(RANKS), help="kinds")
    parser.add_argument("--policies", nargs="+", choices=EVICTION_POLICIES, default=EVICTION_POLICIES, help="orders")
    parser.add_argument("--minutes", type=float, default=10, help="of traffic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of what is drawn")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5], help="of the blocks needed")
    asked = parser.parse_args()
    rows = {_key(row): row for row in json.loads(asked.json.read_text())["rows"]} if asked.json.exists() else {}
    for row in measure(asked):
        before = rows.get(_key(row), {"found": {}})
        rows[_key(row)] = row | {"found": before["found"] | row["found"]}
        for figure in ("found_share", "ttft_mean", "session_mean", "session_p99"):
            shown = {name: round(one[figure], 4) for name, one in row["found"].items() if figure in one}
            print(*_key(row), row["blocks"], figure, json.dumps(shown), flush=True)
        write_json(asked.json, {
            "environment": environment(), "machine": MACHINE, "model": "Llama 3.1 8B, bfloat16", "ranks": RANKS,
            "trace": asked.trace.name, "rows": [rows[key] for key in sorted(rows)]})


def _key(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["traffic"], row["seed"], row["share"]


if __name__ == "__main__":
    main()

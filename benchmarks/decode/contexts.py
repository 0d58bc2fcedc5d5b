"""Times decode steps and prompt chunks at long contexts against the roofline of the machine.

The executor runs plans made here, over a cache of random numbers, so that no prompt has to be computed to time what
follows it.  Each bound is the mean of measurements right before and after, as in `steps.py`.  A prompt's time is the
sum of its chunks', interpolated between those timed.

    decode    every row computes one token after `context` tokens; the bound is bytes at the bandwidth of a large sum
    prefill   one row computes a chunk after `context` tokens; the bound is operations at the rate of a large product

    python -m benchmarks.checkpoint CHECKPOINT
    python -m benchmarks.decode contexts CHECKPOINT --context 8000 32000 --rows 1 8
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.commands import parser_of
from benchmarks.decode.steps import mean

from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingSpec
from slotwise.core.record import CACHE_GROUP, NewBlocks, NewRequest, RowKind, StepPlan
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import Roofline
from slotwise.engine.config import EngineConfig
from slotwise.engine.executor import Executor
from slotwise.measure.bench.results import environment

CHUNK = 512  # tokens
CHUNKS_AT = 5  # positions of a context at which a chunk is timed


class Rows:
    """Rows on an executor, each with blocks of its own for `context` tokens, none of them computed."""

    def __init__(self, executor: Executor, block_size: int, rows: int, context: int) -> None:
        self._executor = executor
        self._slots = tuple(range(rows))
        self._step = 0
        each = -(-context // block_size)
        params = SamplingSpec(temperature=0.0, ignore_eos=True)
        tokens = torch.randint(10, 4000, (context,), generator=torch.Generator().manual_seed(0)).tolist()
        self._joins = tuple(
            NewRequest(f"row-{row}", row, RequestSpec(tokens, params, row), ()) for row in self._slots)
        self._blocks = tuple(
            NewBlocks(row, CACHE_GROUP, tuple(range(row * each, (row + 1) * each))) for row in self._slots)

    def run(self, start: int, count: int, kind: RowKind) -> float:
        """Returns the seconds of a step in which each row computes `count` tokens from position `start`."""
        number, is_first = len(self._slots), not self._step
        plan = StepPlan(
            self._step, 0.0, (), self._joins if is_first else (), (), self._blocks if is_first else (),
            tuple(join.request_id for join in self._joins), self._slots, (start,) * number, (count,) * number, (),
            (int(kind is RowKind.DECODE),) * number, (kind,) * number, (), (), (), (), None)
        self._step += 1
        began = time.perf_counter()
        self._executor.submit(plan)
        self._executor.collect()
        return time.perf_counter() - began


def filled(loaded: Loaded, config: EngineConfig) -> tuple[Executor, int]:
    """Returns an executor whose cache is full of random numbers, and its block size."""
    engine, info = loaded.engine(config)
    executor: Any = engine.executor
    for cache in executor._caches:
        flat = cache.storage.view(-1)
        pattern = torch.randn(1 << 16).mul_(20 if flat.dtype == torch.int8 else 1).to(flat.dtype)
        whole = len(flat) // len(pattern) * len(pattern)
        flat[:whole].view(-1, len(pattern)).copy_(pattern.expand(whole // len(pattern), -1))
        flat[whole:] = pattern[: len(flat) - whole]
    return executor, info.limits.block_size


def decode(loaded: Loaded, config: EngineConfig, rows: int, context: int, steps: int) -> float:
    """Returns the median seconds of a decode step."""
    crowd = Rows(*filled(loaded, config), rows, context)
    times = [crowd.run(context - 1, 1, RowKind.DECODE) for _ in range(steps + 2)]
    return statistics.median(times[2:])


def prefill(loaded: Loaded, config: EngineConfig, context: int) -> list[tuple[int, float]]:
    """Returns the seconds of the chunk that ends at each of some positions up to `context`."""
    crowd = Rows(*filled(loaded, config), 1, context)
    ends = sorted({CHUNK + round(share * (context - CHUNK) / (CHUNKS_AT - 1)) for share in range(CHUNKS_AT)})
    crowd.run(0, CHUNK, RowKind.PREFILL)
    return [(end, min(crowd.run(end - CHUNK, CHUNK, RowKind.PREFILL) for _ in range(2))) for end in ends]


def whole(chunks: Sequence[tuple[int, float]]) -> float:
    """Returns the seconds of a whole prompt, of which the chunks that end at some positions are known."""
    between = sum((b - a) / CHUNK * (first + second) / 2 for (a, first), (b, second) in pairwise(chunks))
    return between + chunks[0][1] / 2 + chunks[-1][1] / 2


def bound_of_prompt(roofline: Roofline, context: int) -> float:
    """Returns the least seconds of a prompt in chunks."""
    starts = range(0, context, CHUNK)
    costs = [roofline.cost([start], [min(CHUNK, context - start)], int(start + CHUNK >= context)) for start in starts]
    return sum(map(roofline.seconds, costs))


def main() -> None:
    """Parse the command line, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of a step")
    parser.add_argument("--context", type=int, nargs="+", default=[8000, 32000], help="tokens of context of each row")
    parser.add_argument("--steps", type=int, default=12, help="decode steps to take the median of")
    parser.add_argument("--no-prefill", action="store_true", help="time decode steps alone")
    parser.add_argument("--kv-cache-dtype", default="auto", help="data type of the cache")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    config = EngineConfig.of(
        model=args.model, max_num_seqs=max(args.rows), enable_prefix_caching=False, max_model_len=max(args.context),
        kv_cache_dtype=args.kv_cache_dtype)
    loaded = load(config)
    figures, before = [], loaded.measure_machine()
    kinds = [("decode", rows) for rows in args.rows] + ([] if args.no_prefill else [("prefill", 1)])
    print(f"{'':8} {'rows':>4} {'context':>8} {'time':>10} {'GB/s':>6} {'GFLOP/s':>8} {'bound':>10} {'share':>6}")
    for context in args.context:
        for kind, rows in kinds:
            seconds = (decode(loaded, config, rows, context, args.steps) if kind == "decode"
                       else whole(prefill(loaded, config, context)))
            after = loaded.measure_machine()
            machine, before = mean(before, after), after
            roofline = loaded.roofline(machine)
            step = roofline.cost([context - 1] * rows, [1] * rows, rows)
            bound = roofline.seconds(step) if kind == "decode" else bound_of_prompt(roofline, context)
            rates = f"{machine.bytes_per_second / 1e9:6.1f} {machine.operations_per_second / 1e9:8.0f}"
            print(f"{kind:8} {rows:4} {context:8} {seconds * 1e3:7.1f} ms {rates} {bound * 1e3:7.1f} ms "
                  f"{bound / seconds:6.0%}", flush=True)
            figures.append({"kind": kind, "rows": rows, "context": context, "seconds": seconds, "bound": bound,
                            **asdict(machine)})
    if args.output:
        args.output.write_text(json.dumps(
            {"environment": environment(), "steps": figures}, indent=1) + "\n")

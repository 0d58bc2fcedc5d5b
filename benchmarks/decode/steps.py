"""Times pure decode steps of a whole engine against the roofline of the machine.

For each number of rows and tokens of context it prints the median step, and the share of it that two bounds explain.
Each bound is the mean of measurements right before and after, because neighbors halve a machine's bandwidth from one
minute to the next.  Bytes: every weight once and every row's keys and values, at the bandwidth of a sum over as many.
Operations: of products and attention, at the rate of a large product on the path that the weights use.  The larger one
is a lower bound.

    python -m benchmarks.checkpoint CHECKPOINT
    python -m benchmarks.decode steps CHECKPOINT --output benchmarks/results/decode-cpu.json
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from benchmarks.commands import parser_of

from slotwise.compose.engine_builder import Loaded, load
from slotwise.core.params import SamplingSpec
from slotwise.core.request import RequestSpec
from slotwise.core.step_time import Cost, Machine, Roofline
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add
from slotwise.measure.bench.profiler import cost_of
from slotwise.measure.bench.results import environment

BEGINNING = 512  # steps after which the last row has begun, and the first has not ended


def decoding_engine(loaded: Loaded, config: EngineConfig, shape: tuple[int, int], steps: int) -> Engine:
    """Returns an engine with requests for `steps` steps in which all rows decode, at the context in their middle.

    Args:
        shape: rows and context.
    """
    rows, context = shape
    engine, info = loaded.engine(config)
    generator = torch.Generator().manual_seed(0)
    for row in range(rows):
        prompt = torch.randint(10, info.vocab_size, (context - steps // 2,), generator=generator).tolist()
        params = SamplingSpec(temperature=0.0, max_tokens=steps + BEGINNING, ignore_eos=True)
        engine.handle(Add(row, RequestSpec(prompt, params, row)))
    return engine


def median_step(loaded: Loaded, config: EngineConfig, shape: tuple[int, int], steps: int, roofline: Roofline
                ) -> tuple[float, Cost]:
    """Returns the seconds of a step in which all rows decode with about `context` tokens, and its lower bound.

    Args:
        shape: rows and context.
    """
    rows, engine = shape[0], decoding_engine(loaded, config, shape, steps)
    records = []
    while len(records) < steps:
        record = engine.step()
        if len(record.plan.counts) == rows and max(record.plan.counts) == 1:
            records.append(record)
    middle = records[len(records) // 2]
    settled = records[len(records) // 4 :]
    return statistics.median((r.ended_ns - r.started_ns) * 1e-9 for r in settled), cost_of(middle, roofline)


def main() -> None:
    """Parse the command line, print the table and write it."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="rows of a step")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024], help="tokens of context of each row")
    parser.add_argument("--steps", type=int, default=24, help="decode steps to take the median of")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    config = EngineConfig.of(  # decoding rows must not delay rows that have not begun
        model=args.model, max_num_seqs=max(args.rows), enable_prefix_caching=False, max_stall_ms=0,
        max_model_len=max(args.context) + args.steps + BEGINNING, quantization=args.quantization)
    loaded = load(config)
    print(f"{'rows':>5} {'context':>8} {'step':>9} {'GB/s of reads':>14} {'GFLOP/s':>8} {'of bytes':>9} {'of both':>8}")
    figures, before = [], loaded.measure_machine()
    for context in args.context:
        for rows in args.rows:
            seconds, cost = median_step(loaded, config, (rows, context), args.steps, loaded.roofline(before))
            after = loaded.measure_machine()
            machine, before = mean(before, after), after
            by_bytes = cost.bytes / machine.bytes_per_second
            by_operations = cost.operations / machine.operations_per_second
            print(f"{rows:5} {context:8} {seconds * 1e3:6.1f} ms {machine.bytes_per_second / 1e9:14.1f} "
                  f"{machine.operations_per_second / 1e9:8.0f} {by_bytes / seconds:9.0%} "
                  f"{max(by_bytes, by_operations) / seconds:8.0%}", flush=True)
            figures.append({"rows": rows, "context": context, "seconds": seconds, **cost._asdict(), **asdict(machine)})
    if args.output:
        args.output.write_text(json.dumps(
            {"environment": environment(), "steps": figures}, indent=1) + "\n")


def mean(before: Machine, after: Machine) -> Machine:
    return Machine((before.bytes_per_second + after.bytes_per_second) / 2,
                   (before.operations_per_second + after.operations_per_second) / 2)

"""Times the parts of plain decode steps of a whole engine: planning, batch, kernels, sampling, commit, record, log.

The engine runs as in a server; each part is a function that is timed where it is called.  After streaming the weights
the processor's caches hold none of Python's code and objects, so these times are several times those of a loop over
one part.  With --kernels the kernels of the captured step are timed one by one, which changes their time by less than
a microsecond each.

    python -m benchmarks.checkpoint CHECKPOINT
    python -m benchmarks.decode parts CHECKPOINT --rows 1 8 64 --kernels
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.commands import parser_of
from benchmarks.decode.steps import BEGINNING, decoding_engine, mean

from slotwise.compose.engine_builder import Loaded, load
from slotwise.compose.launch import hold_off, settle
from slotwise.compute.kernels.cpu.jit.compiler import CompiledKernel
from slotwise.compute.kernels.cpu.launcher import HEADER, WORDS, KernelGraph, run_recorded
from slotwise.compute.kernels.cpu.products.linear import DEPTH, OUTPUTS
from slotwise.compute.kernels.cpu.simd import stamp
from slotwise.core.record import StepRecord
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.ipc import decode_report, encode, messages_of
from slotwise.engine.record_codec import unpacked
from slotwise.measure.bench.profiler import cost_of
from slotwise.observe.event_log import encode_lines

STEP, KERNELS, PRODUCTS = "step", "kernels", "products"
STAMP_BYTES = 16

Parts = dict[str, list[int]]
"""Nanoseconds of each step."""


def _stamped(pool: int, codes: int, block: int, count: int, stamps: int) -> None:
    """The launcher's program, which notes the time before the first kernel and after each."""
    stamp(stamps)
    for index in range(count):
        run_recorded(pool, codes, block, index)
        block += 8 * WORDS
        stamp(stamps + STAMP_BYTES * (index + 1))


STAMPED = CompiledKernel(_stamped)


class Stopwatch:
    """The time that each part of the step in progress has taken.

    Args:
        by_kernel: run captured steps with a stamp after each kernel.
    """

    def __init__(self, *, by_kernel: bool) -> None:
        self.parts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        run = self._by_kernel if by_kernel else KernelGraph.run
        KernelGraph.run = self._timed(KERNELS, run)  # type: ignore[method-assign]

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the calls of a method of `owner` to a part."""
        setattr(owner, method, self._timed(part, getattr(owner, method)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter_ns()
            result = function(*arguments)
            self.parts[part] += time.perf_counter_ns() - began
            return result

        return call

    def _by_kernel(self, graph: Any) -> torch.Tensor:
        kernels, _ = graph._held
        stamps = np.zeros((len(kernels) + 1, 2), np.int64)
        graph._launcher.pool.run_program(
            STAMPED, graph._codes_address, graph._address, len(kernels), stamps.ctypes.data)
        took = np.diff(stamps @ np.array([10**9, 1]))
        for (code, _, words), nanoseconds in zip(kernels, took.tolist(), strict=True):
            self.kernels[_name_of(code, np.frombuffer(words, np.int64))] += nanoseconds
        result: torch.Tensor = graph.result
        return result


def _name_of(code: CompiledKernel, words: np.ndarray) -> str:
    """A kernel's name, that of a product with its inputs and outputs."""
    name = code.name.rpartition(".")[2].strip("_")
    is_product = f".{PRODUCTS}." in code.name
    return f"{name} {words[DEPTH - HEADER]} x {words[OUTPUTS - HEADER]}" if is_product else name


def watched(engine: Engine, stopwatch: Stopwatch) -> None:
    """Time the parts of an engine's steps."""
    executor: Any = engine.executor
    runner = getattr(executor, "_executor", executor)
    for owner, method, part in (
        (engine._scheduler, "schedule", "plan"), (runner._slots, "write_decode", "batch"),
        (runner, "_sample", "sample"), (executor, "collect", "collect"), (engine._scheduler, "commit", "commit"),
        (engine, "_record", "record")):
        stopwatch.watch(owner, method, part)


def steps_of(loaded: Loaded, config: EngineConfig, shape: tuple[int, int], steps: int, stopwatch: Stopwatch
             ) -> tuple[Parts, Parts, StepRecord]:
    """Returns the parts and the kernels of steps in which all rows decode, and one of their records.

    Args:
        shape: rows and context.
    """
    rows, engine = shape[0], decoding_engine(loaded, config, shape, steps)
    record = engine.step()
    while len(record.plan.counts) < rows or max(record.plan.counts) > 1:
        record = engine.step()
    engine.step()
    watched(engine, stopwatch)
    settle()
    parts, kernels = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for _ in range(steps):
        stopwatch.parts.clear()
        stopwatch.kernels.clear()
        clock = [time.perf_counter_ns()]
        record = engine.step()
        clock.append(time.perf_counter_ns())
        (message,) = [encode(part) for part in messages_of(record)]
        clock.append(time.perf_counter_ns())
        unpacked(decode_report(message))
        clock.append(time.perf_counter_ns())
        encode_lines([record])
        clock.append(time.perf_counter_ns())
        if stopwatch.parts[KERNELS]:  # else the step was captured
            took = dict(zip((STEP, "message", "read by the API", "log"), np.diff(clock).tolist(), strict=True))
            for part, nanoseconds in (took | stopwatch.parts).items():
                parts[part].append(nanoseconds)
            for name, nanoseconds in stopwatch.kernels.items():
                kernels[name].append(nanoseconds)
    return parts, kernels, record


def main() -> None:
    """Parse the command line and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="rows of a step")
    parser.add_argument("--context", type=int, default=256, help="tokens of context of each row")
    parser.add_argument("--steps", type=int, default=60, help="steps to take the medians of")
    parser.add_argument("--kernels", action="store_true", help="time each kernel of the captured step")
    args = parser.parse_args()
    config = EngineConfig.of(
        model=args.model, max_num_seqs=max(args.rows), max_stall_ms=0,
        max_model_len=args.context + args.steps + BEGINNING)
    loaded, stopwatch = load(config), Stopwatch(by_kernel=args.kernels)
    hold_off()
    before = loaded.measure_machine()
    for rows in args.rows:
        parts, kernels, record = steps_of(loaded, config, (rows, args.context), args.steps, stopwatch)
        after = loaded.measure_machine()
        machine, before = mean(before, after), after
        cost = cost_of(record, loaded.roofline(machine))
        took = {part: statistics.median(values) / 1e3 for part, values in parts.items()}
        bound = max(cost.bytes / machine.bytes_per_second, cost.operations / machine.operations_per_second) * 1e6
        print(f"rows {rows}: {took[STEP]:,.0f} us, {took[STEP] - took[KERNELS]:,.0f} of them outside the kernels; "
              f"bound {bound:,.0f} us ({machine.bytes_per_second / 1e9:.1f} GB/s, "
              f"{machine.operations_per_second / 1e9:.0f} GFLOP/s), {bound / took[STEP]:.0%}")
        print("    " + "  ".join(f"{part} {us:,.0f}" for part, us in took.items() if part != STEP), flush=True)
        for name, values in sorted(kernels.items(), key=lambda pair: -statistics.median(pair[1])):
            print(f"    {statistics.median(values) / 1e3:9,.0f} us  {name}", flush=True)

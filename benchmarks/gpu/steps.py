"""Times decode and prefill steps of the whole engine against the roofline, and measures the device's idle share.

A step's time is from the end of one step to the end of the next, as the engine sees it, so it includes every delay by
the host.  The device's activity is intervals of time, from the profiler.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.gpu import machine
from benchmarks.gpu.figures import tell
from benchmarks.gpu.machine import Bounds, Machine
from benchmarks.gpu.setup import Setup, asked, load
from torch.profiler import ProfilerActivity, profile

from slotwise.compute.kernels.select import choose
from slotwise.core.record import StepRecord
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Finish

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
PROMPTS = 1_000_000  # ids of requests from here on are those of prompts, smaller ones those of rows
NAMED = 12  # kinds of work that take longest


class Span(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start: float  # microseconds
    end: float


def watch(work: Callable[[], None], device: torch.device) -> list[Span]:
    """Returns the device's spans during `work`; on the CPU, for rehearsals, torch's operators."""
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            work()
            if on_gpu:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = DEVICE_WORK if on_gpu else ("cpu_op",)
    return [Span(event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events if event.get("cat") in wanted and event.get("ph") == "X"]


def idle_share(spans: Sequence[Span]) -> float:
    """Returns the share of the time between the first and the last span that no span covers.

    Raises:
        ValueError: `spans` is empty.
    """
    if not spans:
        raise ValueError("the profiler saw no work of the device")
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    busy, reached = 0.0, first
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return 1 - busy / (last - first)


def shares(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the kinds of work that took longest, with their share of the total."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.name] += span.end - span.start
    total = sum(seconds.values())
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:NAMED]
    return [{"name": name[:80], "share": round(taken / total, 4)} for name, taken in longest]


SETTLING = 6  # first steps of a kind, which capture and compile
WATCHED = 12  # steps under the profiler
NANO = 1e-9


def main() -> None:
    setup = asked(__doc__)
    device = choose(setup.device).device
    measured = machine.measure(setup)
    tell(machine=measured._asdict())
    engine, info = load(setup).engine(setup.engine_config())
    tell(memory={name: getattr(info.memory, name) for name in ("weights", "workspace", "cache")},
         blocks=info.limits.num_blocks)
    bench = Bench(engine, setup, measured, Bounds(setup.model))
    tell(prefill=bench.prefill())
    decoded = {}
    for rows in setup.rows:
        decoded[str(rows)] = bench.decode(rows)
        tell(decode=decoded)
    tell(idle=bench.idle(lambda work: watch(work, device)))


class Bench:
    """An engine and its bounds."""

    def __init__(self, engine: Engine, setup: Setup, machine: Machine, bounds: Bounds) -> None:
        self._engine = engine
        self._setup = setup
        self._machine = machine
        self._bounds = bounds

    def prefill(self) -> dict[str, Any]:
        """Returns figures of steps that are one whole prompt each."""
        tokens = self._setup.prefill_tokens
        for number in range(self._setup.prefill_steps + 2):
            self._engine.handle(self._setup.request(PROMPTS + number, tokens, 1, seed=number))
        records = []
        while self._engine.has_work:
            record = _sound(self._engine.step())
            if record.plan.counts == (tokens,):
                records.append(record)
        seconds = statistics.median(_durations(records[1:]))
        operations = self._bounds.operations(records[-1])
        return {"tokens": tokens, "step_seconds": seconds, "operations": operations,
                "of_product_rate": operations / self._machine.operations_per_second / seconds,
                "tokens_per_second": tokens / seconds}

    def decode(self, rows: int) -> dict[str, Any]:
        """Returns figures of steps in which `rows` rows decode, each with about `Setup.context` tokens."""
        self._fill(rows)
        records = [self._steady(rows) for _ in range(SETTLING + self._setup.decode_steps)][SETTLING - 1 :]
        self._clear(rows)
        seconds = statistics.median(_durations(records))
        num_bytes = self._bounds.bytes(records[len(records) // 2])
        bound = num_bytes / self._machine.bytes_per_second
        return {"rows": rows, "step_seconds": seconds, "bytes": num_bytes, "roofline_seconds": bound,
                "of_roofline": bound / seconds, "tokens_per_second": rows / seconds}

    def idle(self, watching: Callable[[Callable[[], None]], list[Span]]) -> dict[str, Any]:
        """Returns the device's idle share while all rows decode, and its longest kinds of work."""
        rows = max(self._setup.rows)
        self._fill(rows)
        records = [self._steady(rows) for _ in range(SETTLING)]
        spans = watching(lambda: records.extend(self._steady(rows) for _ in range(WATCHED)))
        self._clear(rows)
        return {"rows": rows, "share": idle_share(spans), "steps": WATCHED,
                "step_seconds": statistics.median(_durations(records[SETTLING:])), "busy_with": shares(spans)}

    def _fill(self, rows: int) -> None:
        """Adds `rows` requests, and steps until all of them decode."""
        steps = SETTLING + max(self._setup.decode_steps, WATCHED)
        num_prompt = max(1, self._setup.context - steps // 2)
        for row in range(rows):
            num_output = self._setup.longest - num_prompt
            self._engine.handle(self._setup.request(row, num_prompt, num_output, seed=row))
        while True:
            record = _sound(self._engine.step())
            if len(record.plan.counts) == rows and max(record.plan.counts) == 1:
                return

    def _steady(self, rows: int) -> StepRecord:
        record = _sound(self._engine.step())
        if len(record.plan.counts) != rows or max(record.plan.counts) > 1:
            raise RuntimeError(f"a step of {len(record.plan.counts)} rows is not one in which {rows} decode")
        return record

    def _clear(self, rows: int) -> None:
        for row in range(rows):
            self._engine.handle(Finish(row, "abort"))
        while self._engine.has_work:
            self._engine.step()


def _sound(record: StepRecord) -> StepRecord:
    if record.outcome.failure or any(end.message for end in record.ended):
        raise RuntimeError(record.outcome.failure or next(end.message for end in record.ended if end.message))
    return record


def _durations(records: list[StepRecord]) -> list[float]:
    """Returns the seconds from the end of each record to the end of the next."""
    return [(after.ended_ns - before.ended_ns) * NANO for before, after in pairwise(records)]


if __name__ == "__main__":
    main()

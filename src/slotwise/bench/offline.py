"""Measures an engine in this process: a workload's throughput, and the latency of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slotwise.bench.accounting import Accounts
from slotwise.bench.measures import percentile
from slotwise.bench.offline_run import Stand, run_offline, run_warm
from slotwise.bench.results import environment, workload_facts
from slotwise.engine.messages import StepRecord
from slotwise.workload.lengths import Fixed
from slotwise.workload.requests import Recipe, Workload, generate

MAX_ITERATIONS = 100_000
PERCENTS = (10, 25, 50, 75, 90, 99)
Watch = Callable[[int], None]
"""Receives the number of requests, or iterations, done."""


def ignore(done: int) -> None:
    """A `Watch` that does nothing."""


def throughput(stand: Stand, workload: Workload, watch: Watch = ignore) -> dict[str, Any]:
    """Run a workload as fast as possible.  An interrupt ends it, and the figures are those of completed requests.

    Field names are those of `vllm bench throughput` where it has them; latencies are in seconds.

    Raises:
        ValueError: a request can never run.
        KeyboardInterrupt: before any request had ended.
    """
    seen: list[Accounts] = []

    def on_step(accounts: Accounts, record: StepRecord) -> None:
        seen[:] = [accounts]
        watch(len(accounts.outputs))

    status = "completed"
    try:
        accounts = run_warm(stand, workload, on_step)
    except KeyboardInterrupt:
        if not seen or not seen[0].outputs:
            raise
        status, accounts = "interrupted", seen[0]
    entry = accounts.entry()
    seconds = entry["seconds"]
    num_input = sum(workload.requests[number].num_prompt for number in accounts.outputs)
    num_output = sum(map(len, accounts.outputs.values()))
    return _head("throughput", status, workload) | {
        "completed": len(accounts.outputs), "elapsed_time": seconds,
        "total_input_tokens": num_input, "total_output_tokens": num_output, "total_num_tokens": num_input + num_output,
        "requests_per_second": len(accounts.outputs) / seconds, "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
        **{name: entry[name] for name in (
            "steps", "mean_rows", "occupancy", "preemptions", "draft_tokens", "accepted_draft_tokens", "ttft", "itl",
            "e2e")},
    }


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one shape, all at once.  Raises ValueError for numbers out of range."""

    size: int
    input_len: int  # tokens
    output_len: int  # tokens
    num_warmup: int  # iterations that do not count
    num_iters: int

    def __post_init__(self) -> None:
        for name, lowest in (("num_warmup", 0), ("num_iters", 1)):
            if not lowest <= getattr(self, name) <= MAX_ITERATIONS:
                raise ValueError(f"{name} must be between {lowest} and {MAX_ITERATIONS}, not {getattr(self, name)}")
        self.workload(0)

    def workload(self, seed: int) -> Workload:
        return generate(Recipe(self.size, Fixed(self.input_len), Fixed(self.output_len)), seed)


def latency(stand: Stand, batch: Batch, seed: int = 0, watch: Watch = ignore) -> dict[str, Any]:
    """Seconds from adding a batch to its last token, repeated with other prompts.

    An interrupt ends it, and the figures are those of complete iterations.  Field names are those of
    `vllm bench latency`.

    Raises:
        ValueError: the batch does not fit the engine.
        KeyboardInterrupt: before any iteration that counts had ended.
    """
    if batch.size > stand.limits.max_num_seqs:
        raise ValueError(f"a batch of {batch.size} needs as many slots: raise --max-num-seqs from "
                         f"{stand.limits.max_num_seqs}")
    seconds: list[float] = []
    status = "completed"
    try:
        for number in range(-batch.num_warmup, batch.num_iters):
            took = run_offline(stand, batch.workload(seed + number)).entry()["seconds"]
            if number >= 0:
                seconds.append(took)
                watch(len(seconds))
    except KeyboardInterrupt:
        if not seconds:
            raise
        status = "interrupted"
    ordered = sorted(seconds)
    return _head("latency", status, batch.workload(seed)) | {
        "batch_size": batch.size, "input_len": batch.input_len, "output_len": batch.output_len,
        "avg_latency": sum(seconds) / len(seconds), "latencies": seconds,
        "percentiles": {str(percent): percentile(ordered, percent) for percent in PERCENTS},
    }


def _head(kind: str, status: str, workload: Workload) -> dict[str, Any]:
    return {
        "version": 1, "kind": kind, "status": status, "environment": environment(), "seed": workload.seed,
        "num_requests": len(workload.requests), "workload": workload_facts(workload)}

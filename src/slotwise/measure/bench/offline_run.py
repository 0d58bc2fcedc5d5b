"""One workload through one engine in this process: requests are added between steps, when they are due.

`throughput` runs a workload as fast as possible, `latency` times one batch again and again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.messages import Add, Command
from slotwise.measure.bench.accounting import NANO, Accounts
from slotwise.measure.bench.measures import percentile
from slotwise.measure.bench.results import environment, workload_facts
from slotwise.measure.workload.distributions import Fixed
from slotwise.measure.workload.workloads import Recipe, Workload, WorkRequest, generate

WARM_UP_OUTPUT = 3  # tokens: the first in a prompt's step, the others in decode steps
WARM_UP_PROMPT = 64  # tokens, at most

OnStep = Callable[[Accounts, StepRecord], None]
"""Called after every step, which the accounts have."""
MAX_ITERATIONS = 100_000
PERCENTS = (10, 25, 50, 75, 90, 99)


class Clock(NamedTuple):
    """The engine's clock, and how to wait on it."""

    now_ns: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep


class SteppedEngine(Protocol):
    """An engine, or a wrapper around one."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, command: Command) -> None: ...

    def wait(self) -> float: ...

    def step(self) -> StepRecord: ...


class Stand(NamedTuple):
    """An engine ready for requests, and its limits."""

    engine: SteppedEngine
    limits: SchedulerLimits
    vocab_size: int
    clock: Clock = Clock()


def objection(workload: Workload, limits: SchedulerLimits) -> str:
    """Why an engine with these limits cannot run this workload; empty when it can."""
    for request in workload.requests:
        found = limits.objection(request.num_prompt, workload.max_tokens)
        if not found and request.num_prompt + request.num_output > limits.max_model_len:
            found = (f"{request.num_prompt} prompt and {request.num_output} output tokens exceed max_model_len "
                     f"{limits.max_model_len}")
        if found:
            return f"request {request.number} of the workload: {found}"
    return ""


def run_offline(stand: Stand, workload: Workload, on_step: OnStep = lambda accounts, record: None) -> Accounts:
    """Run the whole workload, greedily, and account for it.

    Raises:
        ValueError: a request can never run; nothing was started.
        RuntimeError: a request ended without all its tokens.
    """
    if found := objection(workload, stand.limits):
        raise ValueError(found)
    feed = _Feed(stand, workload)
    engine, clock, accounts = stand.engine, stand.clock, feed.accounts
    while True:
        feed.hand_over(clock.now_ns() * NANO)
        if engine.has_work and (wait := engine.wait()) <= 0:
            record = engine.step()
            feed.ended(accounts.step(record))
            on_step(accounts, record)
            if accounts.failures:
                raise RuntimeError(accounts.failures[0])
            continue
        wait = min(wait if engine.has_work else math.inf, feed.next_at - clock.now_ns() * NANO)
        if math.isinf(wait):
            return accounts
        clock.sleep(max(wait, 0.0))


def warm_up(stand: Stand, workload: Workload) -> None:
    """Run a few short requests like the workload's, so that nothing is compiled or first touched while measured.

    Their prompts are others, so that none of the workload's is found in a prefix cache.
    """
    first = workload.requests[: stand.limits.max_num_seqs]
    output = min(WARM_UP_OUTPUT, workload.max_tokens)
    short = tuple(
        replace(request, arrives_at=0.0, num_prompt=min(request.num_prompt, WARM_UP_PROMPT), num_output=output,
                prefix=-1, num_prefix=0)
        for request in first)
    run_offline(stand, Workload(short, output, seed=workload.seed + 1))


def run_warm(stand: Stand, workload: Workload, on_step: OnStep = lambda accounts, record: None) -> Accounts:
    """Warm up, then run; raises as `run_offline`."""
    warm_up(stand, workload)
    return run_offline(stand, workload, on_step)


class _Feed:
    """Adds requests to the engine: at their times, or in a closed loop, one for each that has ended."""

    def __init__(self, stand: Stand, workload: Workload) -> None:
        self._engine = stand.engine
        self._workload = workload
        self._prompts = [workload.prompt_ids(request, stand.vocab_size) for request in workload.requests]
        self._params = SamplingSpec(
            temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=not workload.ends_by_itself)
        self._requests: Iterator[WorkRequest] = iter(workload.requests)
        self._next = next(self._requests, None)
        self._idle_users = workload.users
        self._started_at = stand.clock.now_ns() * NANO
        self._now = self._started_at
        self.accounts = Accounts(stand.limits, self._started_at)

    @property
    def next_at(self) -> float:
        """Seconds on the clock when the next request is due; infinite at the end, and in a closed loop."""
        if self._next is None or self._next.arrives_at is None:
            return math.inf
        return self._started_at + self._next.arrives_at

    def hand_over(self, now: float) -> None:
        """Add the requests due by `now`."""
        while self._next is not None:
            if self._next.arrives_at is None and not self._idle_users:
                return
            if self._next.arrives_at is not None and self.next_at > now:
                return
            self._add(self._next, self.next_at if self._next.arrives_at is not None else self.accounts.ended_at)
            self._next = next(self._requests, None)

    def ended(self, ends: int) -> None:
        """Count ended requests: in a closed loop their users send the next ones."""
        if self._workload.users:
            self._idle_users += ends

    def _add(self, request: WorkRequest, due_at: float) -> None:
        if self._workload.users:
            self._idle_users -= 1
        self.accounts.arrived(request.number, request.num_prompt, due_at)
        length = 0 if self._workload.ends_by_itself else request.num_output
        self._engine.handle(Add(request.number, RequestSpec(
            tuple(self._prompts[request.number]), self._params, request.number, forced_length=length)))


# -- throughput and latency --------------------------------------------------------------------------------------------

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
    outputs = [len(tokens) for tokens in accounts.outputs.values()]
    num_output = sum(outputs)
    return _head("throughput", status, workload, outputs) | {
        "completed": len(accounts.outputs), "elapsed_time": seconds,
        "total_input_tokens": num_input, "total_output_tokens": num_output, "total_num_tokens": num_input + num_output,
        "requests_per_second": len(accounts.outputs) / seconds, "tokens_per_second": (num_input + num_output) / seconds,
        "output_tokens_per_second": num_output / seconds,
        **{name: entry[name] for name in (
            "steps", "mean_rows", "occupancy", "preemptions", "draft_tokens", "accepted_draft_tokens", "ttft", "itl",
            "e2e")},
    }


@dataclass(frozen=True, slots=True)
class LatencyBatch:
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


def latency(stand: Stand, batch: LatencyBatch, seed: int = 0, watch: Watch = ignore) -> dict[str, Any]:
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


def _head(kind: str, status: str, workload: Workload, outputs: Sequence[int] = ()) -> dict[str, Any]:
    return {
        "version": 1, "kind": kind, "status": status, "environment": environment(), "seed": workload.seed,
        "num_requests": len(workload.requests), "workload": workload_facts(workload, outputs=outputs)}

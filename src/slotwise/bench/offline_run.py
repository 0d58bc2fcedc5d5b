"""One workload through one engine in this process: requests are added when they are due, between steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from slotwise.bench.accounting import NANO, Accounts
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Command, StepRecord
from slotwise.workload.requests import Workload, WorkRequest

WARM_UP_OUTPUT = 3  # tokens: the first in a prompt's step, the others in decode steps
WARM_UP_PROMPT = 64  # tokens, at most

OnStep = Callable[[Accounts, StepRecord], None]
"""Called after every step, which the accounts have."""


class Clock(NamedTuple):
    """The engine's clock, and how to wait on it."""

    now_ns: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep


class Stepped(Protocol):
    """An engine, or a wrapper around one."""

    @property
    def has_work(self) -> bool: ...

    def handle(self, command: Command) -> None: ...

    def wait(self) -> float: ...

    def step(self) -> StepRecord: ...


class Stand(NamedTuple):
    """An engine ready for requests, and its limits."""

    engine: Stepped
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
        self._params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
        self._requests: Iterator[WorkRequest] = iter(workload.requests)
        self._next = next(self._requests, None)
        self._idle_users = workload.users
        self._started_at = stand.clock.now_ns() * NANO
        self._now = self._started_at
        self.accounts = Accounts(stand.limits, self._started_at)

    @property
    def next_at(self) -> float:
        """Seconds on the clock when the next request is due; infinite when none is left, or none at a fixed time."""
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
        name = str(request.number)
        self.accounts.arrived(name, request.number, request.num_prompt, due_at)
        self._engine.handle(Add(name, RequestSpec(
            tuple(self._prompts[request.number]), self._params, request.number, forced_length=request.num_output)))

"""Runs a few real steps at start, to fit the initial step-time model.

A new engine has measured no step, and after a burst at its start no small one, so it could not predict the time of a
single row.  Rooflines ignore kernel launches and caches that hold half of the weights; a few small, fast steps are
cheaper than a model of those.

The first stage is the largest, and the model does not learn from it: its steps are the first to touch their memory, a
cost that no later step has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slotwise.batching.continuous import Chunked
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.scheduler import Scheduler
from slotwise.core.step_time import StepTimeModel, work_of
from slotwise.engine.engine import Clock, Engine
from slotwise.engine.executor import Executor
from slotwise.engine.messages import Add, Finish
from slotwise.policies.fcfs import FirstComeFirstServed

COLD = (16, 64, 2)  # decode rows, tokens of a prompt beside them in the last step, steps before it
STAGES = ((1, 16, 4), (4, 64, 4), (12, 0, 4), (1, 0, 16))  # likewise; the first step of a row count captures a graph
SECONDS = 1.0  # after which no further step starts
OUTPUT = 64  # tokens that a row may grow by: more than the number of steps
ANY_TOKEN = 0


def warmup(executor: Executor, limits: SchedulerLimits, clock: Clock, seconds: float = SECONDS) -> StepTimeModel:
    """Returns a model of this executor's step times; afterwards all its slots and blocks are free again.

    Stops at a step that fails: the first served step meets the same failure and reports it.
    """
    times, ends = StepTimeModel(), clock() + round(seconds * 1e9)
    rows = _Rows(executor, limits, clock)
    if rows.play(COLD, StepTimeModel(), lambda: clock() < ends):
        for stage in STAGES:
            if not rows.play(stage, times, lambda: clock() < ends):
                break
    rows.leave()
    return times


class _Rows:
    """Runs decode rows and prompts on an engine of their own."""

    def __init__(self, executor: Executor, limits: SchedulerLimits, clock: Clock) -> None:
        alone = replace(
            limits, enable_prefix_caching=False, max_step_ms=None, max_stall_ms=None, tiers=())
        self._engine = Engine(Scheduler(alone, Chunked(), FirstComeFirstServed()), executor, clock)
        self._limits = limits
        self._names: list[str] = []  # ids of the decode rows
        self._asked = 0

    def play(self, stage: tuple[int, int, int], times: StepTimeModel, goes_on: Callable[[], bool]) -> bool:
        """Runs one stage, from which `times` learns; returns whether all its steps ran."""
        rows, prompt, steps = stage
        rows = min(rows, max(1, self._limits.max_num_seqs - 1))
        while len(self._names) > rows:
            self._engine.handle(Finish(self._names.pop(), "abort"))
        while len(self._names) < rows:
            self._names.append(self._ask(1, OUTPUT))
        if not all(self._taught(times, goes_on) for _ in range(steps)):
            return False
        if not prompt or rows == self._limits.max_num_seqs:
            return True
        self._ask(prompt, 1)
        return self._taught(times, goes_on)

    def leave(self) -> None:
        for number in range(self._asked):
            self._engine.handle(Finish(f"probe-{number}", "abort"))
        self._engine.step()  # its plan releases the slots

    def _ask(self, tokens: int, max_tokens: int) -> str:
        longest = self._limits.max_model_len - 1
        name = f"probe-{self._asked}"
        self._asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=min(max_tokens, longest), ignore_eos=True)
        self._engine.handle(Add(name, [ANY_TOKEN] * min(tokens, longest), params, seed=0))
        return name

    def _taught(self, times: StepTimeModel, goes_on: Callable[[], bool]) -> bool:
        """Runs one step, from which `times` learns; returns whether it ran."""
        if not goes_on():
            return False
        record = self._engine.step()
        if record.failure or not record.counts:
            return False
        times.step(work_of(record.starts, record.counts), record.started_ns * 1e-9, record.ended_ns * 1e-9)
        return True

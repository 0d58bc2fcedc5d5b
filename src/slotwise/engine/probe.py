"""A few real steps before anybody asks, for a model of step times to begin with.

An engine that has just started has seen no step, and one whose first minutes are a burst has seen no small one: it
could not tell what a row alone would take.  Rooflines know nothing of starting kernels, and of caches that hold half of
the weights; a handful of steps of few rows is cheaper than any theory of them, for small steps are the fast ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from slotwise.batching.continuous import Chunked
from slotwise.core.limits import SchedulerLimits
from slotwise.core.params import SamplingParams
from slotwise.core.scheduler import Scheduler
from slotwise.core.steptime import StepTimes, work_of
from slotwise.engine.executor import Executor
from slotwise.engine.loop import Clock, Engine
from slotwise.engine.messages import Add, Finish
from slotwise.policies.fcfs import FirstComeFirstServed

STAGES = ((1, 16), (4, 64), (16, 0))  # rows that decode, then tokens of a prompt beside them
STEPS = 4  # of as many rows: the first of them is recorded
STEPS_ALONE = 24  # of the first row in the end: what it took at first was with caches empty and cores asleep
SECONDS = 1.0  # after which no further step is begun
OUTPUT = 64  # tokens that a row may grow by: more than there are steps
ANY_TOKEN = 0


def probe(executor: Executor, limits: SchedulerLimits, clock: Clock, seconds: float = SECONDS) -> StepTimes:
    """What steps of this executor take, few rows first; afterwards all its slots and blocks are free again.

    A step that breaks is the last: whoever serves will meet what broke it, and can tell somebody.
    """
    times = StepTimes()
    alone = replace(
        limits, enable_prefix_caching=False, max_step_ms=None, max_stall_ms=None, max_step_context=0, tiers=())
    engine = Engine(Scheduler(alone, Chunked(), FirstComeFirstServed()), executor, clock)
    names: list[str] = []
    ends = clock() + round(seconds * 1e9)
    for tokens, max_tokens, steps in _requests(limits):
        names.append(f"probe-{len(names)}")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.handle(Add(names[-1], [ANY_TOKEN] * tokens, params, seed=0))
        if not _taught(times, engine, steps, lambda: clock() < ends):
            break
    else:
        _abort(engine, names[1:])
        _taught(times, engine, STEPS_ALONE, lambda: clock() < ends)
    _abort(engine, names)
    engine.step()  # its plan says who has left
    return times


def _abort(engine: Engine, names: list[str]) -> None:
    for name in names:
        engine.handle(Finish(name, "abort"))


def _requests(limits: SchedulerLimits) -> Iterator[tuple[int, int, int]]:
    """Tokens of a prompt and of its output, and how many steps follow its arrival."""
    running, longest = 0, limits.max_model_len - 1
    for rows, prompt in STAGES:
        rows = min(rows, limits.max_num_seqs - 1)
        while running < rows:
            running += 1
            yield 1, min(OUTPUT, longest), STEPS if running == rows else 0
        if prompt and running:
            yield min(prompt, longest), 1, 1


def _taught(times: StepTimes, engine: Engine, steps: int, goes_on: Callable[[], bool]) -> bool:
    """Whether all steps could be run."""
    for _ in range(steps):
        if not goes_on():
            return False
        record = engine.step()
        if record.failure or not record.counts:
            return False
        if record.step > 0:  # no later one finds everything as cold as the first
            times.step(work_of(record.starts, record.counts), record.started_ns * 1e-9, record.ended_ns * 1e-9)
    return True

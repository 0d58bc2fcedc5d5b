"""Steps of every size in about a minute: their event log is the machine that the simulator's commands read.

Each load is a closed loop of 1, 2, 4, ... users, with prompts of one length: rows join and leave, so that its steps
decode few and many rows, with and without a chunk of a prompt.  All loads run in turn until the time is
over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slotwise.core.record import StepRecord
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.step_time import Work
from slotwise.measure.bench.accounting import NANO, Accounts
from slotwise.measure.bench.offline_run import Stand, run_offline, warm_up
from slotwise.measure.bench.results import environment
from slotwise.measure.simulate.recorded import read_recording
from slotwise.measure.workload.distributions import Closed, Uniform
from slotwise.measure.workload.workloads import Recipe, Workload, generate
from slotwise.observe.log_file import read_file

PROMPTS = (16, 64, 256, 1024, 4096)  # the longest of a load's prompts, in tokens
OUTPUTS = Uniform(4, 24)
TURNS = 2  # requests of a user
MOST = 8192  # prompt tokens of a load: more take too much of a minute on a slow machine
SHOWN = (1, 4, 16, 64)  # rows of a decode step, in the result


def loads(limits: SchedulerLimits) -> Iterator[Recipe]:
    """Yields the loads that an engine with these limits can run, the smallest first."""
    recipes = []
    for exponent in range(limits.max_num_seqs.bit_length()):
        users = 1 << exponent
        for prompt in PROMPTS:
            room = min(limits.max_model_len, limits.cache_tokens) - OUTPUTS.longest
            if prompt <= room and prompt * users * TURNS <= MOST:
                recipes.append(Recipe(users * TURNS, Uniform(max(1, prompt // 2), prompt), OUTPUTS, Closed(users)))
    return iter(sorted(recipes, key=lambda one: one.num_requests * one.inputs.longest))


def run_steps(stand: Stand, seconds: float, watch: Callable[[float], None]) -> dict[str, Any]:
    """Runs loads for at least `seconds`, and at least the smallest.

    Args:
        watch: called after each step with the seconds that have passed.

    Raises:
        ValueError: the limits leave no room for any load.
    """
    workloads = _workloads(stand.limits)
    began = stand.clock.now_ns() * NANO
    passed, steps, status = 0.0, 0, "completed"

    def on_step(accounts: Accounts, record: StepRecord) -> None:
        nonlocal passed, steps
        steps += 1
        passed = stand.clock.now_ns() * NANO - began
        watch(passed)

    try:
        warm_up(stand, next(workloads))
        while passed < seconds:
            run_offline(stand, next(workloads), on_step)
    except KeyboardInterrupt:
        status = "interrupted"
    return {"version": 1, "kind": "steps", "status": status, "environment": environment(), "steps": steps,
            "seconds": passed}


def _workloads(limits: SchedulerLimits) -> Iterator[Workload]:
    """Yields loads without an end, each time with other lengths."""
    recipes = list(loads(limits))
    if not recipes:
        raise ValueError(f"no load of {PROMPTS[0]} prompt tokens and {OUTPUTS.longest} more fits the engine's limits")
    seed = 0
    while True:
        for recipe in recipes:
            yield generate(recipe, seed)
            seed += 1


def fitted(log: Path) -> dict[str, Any]:
    """Returns what the simulator's commands learn from a log: predicted milliseconds of some steps, and the error."""
    setup, recording = read_recording(read_file(log))
    times, most = recording.times, setup.limits.max_num_seqs
    rows = [number for number in SHOWN if number <= most]
    prompts = [number for number in PROMPTS if number <= setup.limits.max_num_batched_tokens]
    return {
        "median_error": times.error, "pause_ms": setup.pace.between() * 1e3,
        "decode_ms": {str(number): times.typical(Work(number, number, number * 256, 0.0)) * 1e3 for number in rows},
        "prompt_ms": {str(number): times.typical(Work(number, 1, 0, number * (number + 1) / 2)) * 1e3
                      for number in prompts}}

"""Where a run's time went: compared with its roofline, and divided among kernels and everything else.

Two runs of the same workload on the same weights.  The first is as fast as possible and is compared with the roofline;
in the second every kernel is started by itself and timed, which makes it slower and shows the shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slotwise.bench.accounting import NANO
from slotwise.bench.offline_run import OnStep, Stand, run_offline, warm_up
from slotwise.bench.roofline import Achieved
from slotwise.compose.engine import load
from slotwise.compose.machine import measure_machine
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Command, StepRecord
from slotwise.kernels.timed import TimedKernels
from slotwise.workload.requests import Workload

REST = "plan, batch, sampling, Python"
BETWEEN = "commit and between steps"


class Watched:
    """An engine whose records also go to `watch`."""

    def __init__(self, engine: Engine, watch: Callable[[StepRecord], None]) -> None:
        self._engine = engine
        self._watch = watch

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def handle(self, command: Command) -> None:
        self._engine.handle(command)

    def wait(self) -> float:
        """Seconds, as `Engine.wait`."""
        return self._engine.wait()

    def step(self) -> StepRecord:
        record = self._engine.step()
        self._watch(record)
        return record


class Profiler:
    """A loaded model, on kernels with timers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._kernels: list[TimedKernels] = []
        self._loaded = load(config, wrap=self._wrap)

    def _wrap(self, kernels: Any) -> TimedKernels:
        self._kernels.append(TimedKernels(kernels))
        return self._kernels[0]

    def run(self, workload: Workload, on_step: OnStep) -> dict[str, Any]:
        """Both runs, after measuring the machine; seconds throughout.

        Raises:
            ValueError: a request can never run.
        """
        loaded = self._loaded
        achieved = Achieved(loaded.roofline(measure_machine()))
        seconds = self._once(workload, achieved.step, on_step)
        kernels, in_steps = self._kernels[0], [0.0]
        kernels.start()
        timed = self._once(workload, lambda record: _add(in_steps, record), on_step)
        parts = {**kernels.seconds, REST: in_steps[0] - sum(kernels.seconds.values()), BETWEEN: timed - in_steps[0]}
        return {
            "seconds": seconds, "machine": asdict(achieved.roofline.machine), "timed_seconds": timed, "parts": parts,
            "kinds": {kind: vars(tally) | {"achieved": tally.achieved} for kind, tally in achieved.kinds.items()}}

    def _once(self, workload: Workload, watch: Callable[[StepRecord], None], on_step: OnStep) -> float:
        """Seconds of the workload."""
        engine, info = self._loaded.engine(self._config)
        warm_up(Stand(engine, info.limits, info.vocab_size), workload)
        for name in self._kernels[0].seconds:
            self._kernels[0].seconds[name] = 0.0
        stand = Stand(Watched(engine, watch), info.limits, info.vocab_size)
        return float(run_offline(stand, workload, on_step).entry()["seconds"])


def _add(total: list[float], record: StepRecord) -> None:
    total[0] += (record.ended_ns - record.started_ns) * NANO


"""Where a run's time went: compared with its roofline, and divided among kernels and everything else.

Two runs of the same workload on the same weights.  The first is as fast as possible and is compared with the roofline;
in the second every kernel is started by itself and timed, which makes it slower and shows the shares.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slotwise.bench.accounting import NANO, Accounts
from slotwise.bench.offline_run import OnStep, Stand, run_offline, warm_up
from slotwise.bench.roofline import Achieved
from slotwise.compose.engine import load
from slotwise.compose.machine import faster
from slotwise.engine.config import EngineConfig
from slotwise.engine.messages import StepRecord
from slotwise.kernels.interface import Kernels
from slotwise.kernels.timed import TimedKernels
from slotwise.workload.requests import Workload

REST = "plan, batch, sampling, Python"
BETWEEN = "commit and between steps"


class Profiler:
    """A loaded model, on kernels with timers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._kernels: list[TimedKernels] = []
        self._loaded = load(config, wrap=self._wrap)

    def _wrap(self, kernels: Kernels) -> TimedKernels:
        self._kernels.append(TimedKernels(kernels))
        return self._kernels[0]

    def run(self, workload: Workload, on_step: OnStep) -> dict[str, Any]:
        """Both runs, and the machine measured before and after the first; seconds throughout.

        Raises:
            ValueError: a request can never run.
        """
        loaded = self._loaded
        before, records = loaded.measure_machine(), list[StepRecord]()
        seconds = self._once(workload, records.append, on_step)
        achieved = Achieved(loaded.roofline(faster(before, loaded.measure_machine())))
        for record in records:
            achieved.step(record)
        kernels, in_steps = self._kernels[0], array("d")
        kernels.start()
        timed = self._once(
            workload, lambda record: in_steps.append((record.ended_ns - record.started_ns) * NANO), on_step)
        parts = {**kernels.seconds, REST: sum(in_steps) - sum(kernels.seconds.values()), BETWEEN: timed - sum(in_steps)}
        return {
            "seconds": seconds, "machine": asdict(achieved.roofline.machine), "product_path": loaded.product_path,
            "timed_seconds": timed, "parts": parts,
            "kinds": {kind: vars(tally) | {"achieved": tally.achieved} for kind, tally in achieved.kinds.items()}}

    def _once(self, workload: Workload, watch: Callable[[StepRecord], None], on_step: OnStep) -> float:
        """Seconds of the workload."""
        engine, info = self._loaded.engine(self._config)
        stand = Stand(engine, info.limits, info.vocab_size)
        warm_up(stand, workload)
        for name in self._kernels[0].seconds:
            self._kernels[0].seconds[name] = 0.0

        def seen(accounts: Accounts, record: StepRecord) -> None:
            watch(record)
            on_step(accounts, record)

        return float(run_offline(stand, workload, seen).entry()["seconds"])


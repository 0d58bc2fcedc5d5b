"""Where a run's time went: compared with its roofline, and divided among kernels and everything else.

Two runs of the same workload on the same weights.  The first is as fast as possible and is compared with the roofline
(`core/step_time.py`) of the machine, which is measured in the same process; in the second every kernel is started by
itself and timed, which makes it slower and shows the shares.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from slotwise.compose.engine_builder import load
from slotwise.compose.machine import faster
from slotwise.compute.kernels.interface import Kernels
from slotwise.compute.kernels.timed import TimedKernels
from slotwise.core.record import RowKind, StepRecord
from slotwise.core.step_time import Cost, Roofline
from slotwise.engine.config import EngineConfig
from slotwise.measure.bench.accounting import NANO, Accounts
from slotwise.measure.bench.offline_run import OnStep, Stand, run_offline, warm_up
from slotwise.measure.workload.workloads import Workload

DECODE, MIXED, PREFILL = "decode", "mixed", "prefill"
KINDS = (DECODE, MIXED, PREFILL)
REST = "plan, batch, sampling, Python"
BETWEEN = "commit and between steps"


class Tally:
    """The steps of one kind."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.bytes_seconds = 0.0  # by memory bandwidth alone
        self.operations_seconds = 0.0  # by compute rate alone
        self.bound_seconds = 0.0  # the larger of both, and at most the time that it took, step by step

    @property
    def achieved(self) -> float:
        """Share of the time that the bound explains."""
        return self.bound_seconds / self.seconds if self.seconds else 0.0


class RooflineShares:
    """Folds step records into their costs and times, by kind."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.kinds = {kind: Tally() for kind in KINDS}

    def step(self, record: StepRecord) -> None:
        """Count one step; a record without rows is ignored."""
        if not record.plan.counts:
            return
        cost, machine = cost_of(record, self.roofline), self.roofline.machine
        tally = self.kinds[kind_of(record)]
        tally.steps += 1
        tally.tokens += sum(record.plan.counts)
        seconds = (record.ended_ns - record.started_ns) * NANO
        tally.seconds += seconds
        tally.bytes_seconds += cost.bytes / machine.bytes_per_second
        tally.operations_seconds += cost.operations / machine.operations_per_second
        tally.bound_seconds += min(seconds, self.roofline.seconds(cost))


def cost_of(record: StepRecord, roofline: Roofline) -> Cost:
    return roofline.cost(record.plan.starts, record.plan.counts, sum(1 for tokens in record.tokens if tokens))


def kind_of(record: StepRecord) -> str:
    """Decode: no row of a prompt; prefill: only such rows; mixed: both."""
    if RowKind.PREFILL not in record.plan.kinds:
        return DECODE
    return MIXED if RowKind.DECODE in record.plan.kinds else PREFILL


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
        achieved = RooflineShares(loaded.roofline(faster(before, loaded.measure_machine())))
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

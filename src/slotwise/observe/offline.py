"""Records an engine in this process, for `LLM` and the offline benchmarks: its event log, its metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slotwise.observe.metrics import Metrics
from slotwise.observe.recorder import File, Recorder
from slotwise.observe.ring import Ring

if TYPE_CHECKING:
    from slotwise.engine.engine import Engine
    from slotwise.engine.messages import Command, EngineInfo, StepRecord


class Logged:
    """An engine that also writes its commands and steps to `file`, if there is one."""

    def __init__(self, engine: Engine, info: EngineInfo, file: File | None = None) -> None:
        self._engine = engine
        self._info = info
        self._recorder = Recorder(Ring(capacity=1))
        self._recorder.started(info)
        self._metrics: Metrics | None = None
        if file is not None:
            self._recorder.write_to(file)

    def metrics(self, model_name: str) -> Metrics:
        """Metrics that count from now on, under vLLM's names, too: scripts look them up."""
        self._metrics = Metrics(model_name, self._info, self._recorder.timelines, has_vllm_names=True)
        self._recorder.add_reader(self._metrics)
        return self._metrics

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def handle(self, command: Command) -> None:
        self._recorder.commanded(command, time.monotonic_ns())
        self._engine.handle(command)

    def wait(self) -> float:
        """Seconds, as `Engine.wait`."""
        return self._engine.wait()

    def step(self) -> StepRecord:
        record = self._engine.step()
        self._recorder.stepped(record)
        if self._metrics is not None:
            self._metrics.stepped(record)
        return record

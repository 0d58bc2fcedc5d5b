"""Records an engine in this process, for `LLM` and the offline benchmarks: its event log, its metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slotwise.core.record import StepRecord
from slotwise.observe.metrics import Metrics
from slotwise.observe.recorder import File, Recorder
from slotwise.observe.ring import Ring

if TYPE_CHECKING:
    from slotwise.engine.engine import Engine
    from slotwise.engine.messages import Command, EngineInfo


class Recording:
    """Hears of commands and steps; also writes them to `file`, if there is one."""

    def __init__(self, info: EngineInfo, file: File | None = None) -> None:
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

    def started(self, info: EngineInfo) -> None:
        """Another engine of the same model is ready."""
        self._recorder.started(info)
        if self._metrics is not None:
            self._metrics.started(info)

    def commanded(self, command: Command) -> None:
        """The engine is about to handle a command."""
        self._recorder.commanded(command, time.monotonic_ns())

    def stepped(self, record: StepRecord) -> None:
        """The engine has made a step."""
        self._recorder.stepped(record)
        if self._metrics is not None:
            self._metrics.stepped(record)


class Logged:
    """An engine whose commands and steps are also recorded."""

    def __init__(self, engine: Engine, info: EngineInfo, file: File | None = None) -> None:
        self._engine = engine
        self._recording = Recording(info, file)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def handle(self, command: Command) -> None:
        self._recording.commanded(command)
        self._engine.handle(command)

    def wait(self) -> float:
        """Seconds, as `Engine.wait`."""
        return self._engine.wait()

    def step(self) -> StepRecord:
        record = self._engine.step()
        self._recording.stepped(record)
        return record

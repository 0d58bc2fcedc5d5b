"""Writes the event log of an engine in this process, for `LLM` and the offline benchmarks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from slotwise.observe.recorder import File, Recorder
from slotwise.observe.ring import Ring

if TYPE_CHECKING:
    from slotwise.engine.engine import Engine
    from slotwise.engine.messages import Command, EngineInfo, StepRecord


class Logged:
    """An engine that also writes its commands and steps to `file`."""

    def __init__(self, engine: Engine, info: EngineInfo, file: File) -> None:
        self._engine = engine
        self._recorder = Recorder(Ring(capacity=1))
        self._recorder.started(info)
        self._recorder.write_to(file)

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
        return record

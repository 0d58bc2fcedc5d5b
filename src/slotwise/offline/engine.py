"""The engine of an `LLM`: built at the start, and again after a sleep that gave its memory back.

    level 1   the memory of the cache is the system's; weights stay
    level 2   the engine is gone with all of its memory; to wake up is to read the weights again
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slotwise.compose.engine_builder import load
from slotwise.engine.adapters import AdapterStore
from slotwise.engine.engine import Engine
from slotwise.errors import CheckpointError
from slotwise.offline.arguments import Arguments
from slotwise.runner import memory_budget

if TYPE_CHECKING:
    from slotwise.engine.messages import Command, StepRecord
    from slotwise.observe.metrics import Metrics
    from slotwise.observe.offline import Recording

LEVELS = (1, 2)


class OfflineEngine:
    """Used by one thread at a time, which holds the lock of its `LLM`.

    Args:
        event_log: a file that is written; empty: none.

    Raises:
        CheckpointError, ConfigError: one line that says what is wrong and what to do.
    """

    def __init__(self, arguments: Arguments, event_log: str | Path) -> None:
        if event_log:
            from slotwise.observe import log_file  # needs msgspec, which may not be installed

            log_file.check(event_log)
        self._config = arguments.config
        self._recording: Recording | None = None
        self.metrics: Metrics | None = None
        self.level = 0  # of its sleep; 0: awake
        self._start()
        if event_log or arguments.log_stats:
            from slotwise.observe.offline import Recording

            file = log_file.LogFile(event_log) if event_log else None
            if file is not None:
                weakref.finalize(self, file.close)
            self._recording = Recording(self.info, file)
            self.metrics = self._recording.metrics(arguments.name) if arguments.log_stats else None

    def _start(self) -> None:
        loaded = load(self._config)
        engine, self.info = loaded.engine(self._config)
        self._engine: Engine | None = engine
        self.adapters: AdapterStore | None = loaded.adapters

    @property
    def has_work(self) -> bool:
        """As `Engine.has_work`."""
        return self._engine is not None and self._engine.has_work

    @property
    def _awake(self) -> Engine:
        """Raises RuntimeError while it sleeps."""
        if self.level or self._engine is None:
            raise RuntimeError("the model is asleep: call wake_up()")
        return self._engine

    # -- requests ------------------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """As `Engine.handle`.  Raises RuntimeError while it sleeps."""
        engine = self._awake
        if self._recording is not None:
            self._recording.commanded(command)
        engine.handle(command)

    def wait(self) -> float:
        """Seconds, as `Engine.wait`."""
        return self._awake.wait()

    def step(self) -> StepRecord:
        """As `Engine.step`."""
        record = self._awake.step()
        if self._recording is not None:
            self._recording.stepped(record)
        return record

    # -- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Gives memory back; no request may be unfinished.  Does nothing if it sleeps at this level already.

        Raises:
            ValueError: there is no such level, or this engine has none, or it sleeps at another one.
        """
        if level not in LEVELS:
            raise ValueError(f"level: 1 or 2, not {level!r:.40}")
        if self.level:
            if level != self.level:
                raise ValueError(f"level: the model sleeps at level {self.level}; wake it up first")
            return
        if level == 1 and (objection := self._awake.give_back()):
            raise ValueError(f"level: {objection}; level 2 gives everything back")
        if level == 2:
            if self._config.enable_lora:
                raise ValueError("level: 2 would lose the adapters that are loaded; level 1 keeps them")
            self._engine = None
            gc.collect()
            memory_budget.give_back()
        self.level = level

    def wake_up(self) -> None:
        """Ends a sleep.

        Raises:
            CheckpointError: the model's files have changed meanwhile.
        """
        if self.level == 2:
            before = self.info
            self._config = replace(self._config, max_model_len=before.limits.max_model_len)
            self._start()
            if self.info.identity != before.identity:
                self._engine, self.info = None, before
                raise CheckpointError("the checkpoint has changed since the start: make another LLM")
            if self._recording is not None:
                self._recording.started(self.info)
        self.level = 0

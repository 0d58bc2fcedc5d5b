"""The core's model of step times, taught by watching an engine service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotwise.core import steptime
from slotwise.core.steptime import Learned, Prediction, Work, work_of
from slotwise.engine.observer import Observer

if TYPE_CHECKING:
    from slotwise.engine.messages import StepRecord
    from slotwise.observe import log

__all__ = ["Learned", "Prediction", "StepTimes", "Work", "work_of"]

NS = 1e-9


class StepTimes(steptime.StepTimes, Observer):
    def stepped(self, record: StepRecord | log.Step) -> None:
        """Learn from a step of the engine's."""
        work = work_of(record.starts, record.counts, record.padding)
        self.step(work, record.started_ns * NS, record.ended_ns * NS)

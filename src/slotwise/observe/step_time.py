"""The core's step-time model as an observer of an engine service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slotwise.core import step_time
from slotwise.core.step_time import Learned, Prediction, Work, work_of
from slotwise.engine.observer import Observer

if TYPE_CHECKING:
    from slotwise.engine.messages import StepRecord
    from slotwise.observe import event_log

__all__ = ["Learned", "Prediction", "StepTimeModel", "Work", "work_of"]

NS = 1e-9


class StepTimeModel(step_time.StepTimeModel, Observer):
    def stepped(self, record: StepRecord | event_log.Step) -> None:
        """Updates the model with a step of the engine."""
        work = work_of(record.starts, record.counts, record.padding)
        self.step(work, record.started_ns * NS, record.ended_ns * NS)

"""Metrics behind a recorder, as in a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from slotwise.core.params import SamplingSpec
from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Command, EngineInfo, Observer
from slotwise.observe.metrics import Metrics
from slotwise.observe.recorder import Recorder


class Measured(Observer):
    """A recorder and its metrics; `arrive` is short for the command that starts a request."""

    def __init__(self, info: EngineInfo, healthy: Callable[[], bool] = lambda: True, *, has_vllm_names: bool = False,
                 ) -> None:
        self.recorder = Recorder(clock=lambda: 0)
        self.metrics = Metrics("toy", info, self.recorder.timelines, healthy, has_vllm_names=has_vllm_names)
        self.recorder.add_reader(self.metrics)
        self.recorder.started(info)

    def arrive(self, name: str, num_prompt: int, now_ns: int) -> None:
        self.commanded(Add(name, RequestSpec([1] * num_prompt, SamplingSpec())), now_ns)

    def arrive_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.arrive(name, 3, 0)

    def commanded(self, command: Command, now_ns: int) -> None:
        self.recorder.commanded(command, now_ns)

    def stepped(self, record: StepRecord) -> None:
        self.recorder.stepped(record)

    def refused(self, kind: str) -> None:
        self.recorder.refused(kind)

    def lost(self, message: str, now_ns: int) -> None:
        self.recorder.lost(message, now_ns)

    def restarted(self, info: EngineInfo) -> None:
        self.recorder.started(info)
        self.metrics.started(info)

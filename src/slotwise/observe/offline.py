"""Records an engine in this process, for `LLM` and the offline benchmarks: its event log, its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slotwise.core.record import StepRecord
from slotwise.observe.metrics import Metrics
from slotwise.observe.recorder import File, Recorder
from slotwise.observe.ring import Ring

if TYPE_CHECKING:
    from slotwise.engine.engine import Engine
    from slotwise.engine.messages import Command, EngineInfo




# The metrics as objects, with the classes of vLLM's `get_metrics`.

UPPER = "le"  # label of a bucket: its bound


@dataclass(slots=True)
class Metric:
    """One sample of a metric, or a histogram."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    value: float


@dataclass(slots=True)
class Gauge(Metric):
    value: float


@dataclass(slots=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # values up to each bound, by the bound as text


def snapshot(collector: Collector) -> list[Metric]:
    """Returns all metrics as they are now."""
    found: list[Metric] = []
    for family in collector.collect():
        if family.type == "histogram":
            found += _histograms(family)
        else:
            kind = Counter if family.type == "counter" else Gauge
            found += [kind(family.name, dict(sample.labels), sample.value) for sample in family.samples]
    return found


def _histograms(family: Family) -> list[Histogram]:
    def labels(sample: Sample) -> list[tuple[str, str]]:
        return [(name, value) for name, value in sample.labels.items() if name != UPPER]

    found = []
    for own, samples in groupby(family.samples, labels):
        histogram = Histogram(family.name, dict(own), 0, 0.0, {})
        for sample in samples:
            if sample.name.endswith("_bucket"):
                histogram.buckets[sample.labels[UPPER]] = int(sample.value)
            elif sample.name.endswith("_sum"):
                histogram.sum = sample.value
        histogram.count = histogram.buckets["+Inf"]
        found.append(histogram)
    return found


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

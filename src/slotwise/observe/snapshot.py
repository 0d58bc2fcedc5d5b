"""The metrics as objects, with the classes of vLLM's `get_metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

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

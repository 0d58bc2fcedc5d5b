"""Prometheus metrics, folded from step records.  Names and buckets are vLLM's, with the prefix `slotwise:`.

The fold runs beside the engine for every token, so it keeps plain integers and lists; Prometheus' own objects are made
when somebody reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from slotwise.engine.messages import EngineInfo, StepRecord

PREFIX = "slotwise:"
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(2**power for power in range(15))
NS = 1e-9

HISTOGRAMS = {
    "time_to_first_token_seconds": (TTFT, "From arrival to the first token."),
    "inter_token_latency_seconds": (ITL, "Between two tokens of a request."),
    "request_time_per_output_token_seconds": (ITL, "Mean time between the tokens of a request."),
    "e2e_request_latency_seconds": (LATENCY, "From arrival to the end."),
    "request_queue_time_seconds": (LATENCY, "From arrival to the first step."),
    "request_prefill_time_seconds": (LATENCY, "From the first step to the first token."),
    "request_decode_time_seconds": (LATENCY, "From the first token to the last."),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (TOKENS, "Generated tokens of a request."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens computed in a step."),
}
COUNTERS = {
    "num_preemptions_total": "Times a request lost its slot and its blocks.",
    "prompt_tokens_total": "Prompt tokens of requests that reached their first token.",
    "generation_tokens_total": "Tokens generated.",
    "prompt_tokens_cached_total": "Prompt tokens found in the cache when their request first took a slot.",
    "prefix_cache_queries_total": "Tokens looked for in the cache.",
    "prefix_cache_hits_total": "Tokens found in the cache.",
    "recomputed_tokens_total": "Tokens computed again because their request had to yield.",
}
LABELLED = {
    "request_success_total": ("finished_reason", "Requests ended, by how."),
    "admission_rejections_total": ("reason", "Requests refused, by why."),
}


class Histogram:
    """Counts by upper bound; the last count is of what exceeds them all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' form: (upper bound, values up to it)."""
        pairs, below = [], 0
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            below += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), below))
        return pairs


class _Life:
    """What is known of a living request; times are monotonic nanoseconds, 0 while unknown."""

    __slots__ = ("arrived", "first", "last", "lost", "num_output", "num_prompt", "scheduled")

    def __init__(self, arrived: int, num_prompt: int) -> None:
        self.arrived, self.num_prompt = arrived, num_prompt
        self.scheduled = self.first = self.last = self.num_output = 0
        self.lost = 0  # computed tokens it gave up when it last yielded


class Metrics(Collector):
    """An observer of the engine service, and what `/metrics` shows.

    Args:
        model_name: the label on every sample.
        num_blocks: size of the cache, for the share in use.
    """

    def __init__(self, model_name: str, num_blocks: int) -> None:
        self._model_name = model_name
        self._num_blocks = num_blocks
        self._lives: dict[str, _Life] = {}
        self._gauges = (0, 0, 0.0)
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._labelled: dict[str, dict[str, int]] = {name: {} for name in LABELLED}

    # -- listening -----------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        """Another engine, perhaps with another cache; those who lived in the last one were told to have ended."""
        self._num_blocks = info.limits.num_blocks

    def arrived(self, request_id: str, num_prompt: int, now_ns: int) -> None:
        self._lives[request_id] = _Life(now_ns, num_prompt)

    def refused(self, kind: str) -> None:
        self._count("admission_rejections_total", kind)

    def stepped(self, record: StepRecord) -> None:
        for (request_id, _), lost in zip(record.preempted, record.lost, strict=True):
            if (life := self._lives.get(request_id)) is not None:
                life.lost = lost
        for request_id, num_cached in zip(record.admitted, record.cached, strict=True):
            if (life := self._lives.get(request_id)) is not None:
                self._admitted(life, num_cached, record.started_ns)
        self._tokens(record)
        for row in record.ended:
            self._ended(row.request_id, row.reason, record.ended_ns)
        self._counters["num_preemptions_total"] += len(record.preempted)
        if record.counts:
            self._histograms["iteration_tokens_total"].observe(sum(record.counts))
        used = 1 - record.num_free_blocks / self._num_blocks if record.num_running else 0.0
        self._gauges = (record.num_running, record.num_waiting, used)

    def _tokens(self, record: StepRecord) -> None:
        now, lives = record.ended_ns, self._lives
        generated = 0
        since: dict[int, int] = {}  # when rows had their last token: nearly always all at the same time
        for request_id, tokens in zip(record.request_ids, record.token_ids, strict=False):
            if tokens and (life := lives.get(request_id)) is not None:
                generated += len(tokens)
                life.num_output += len(tokens)
                if life.last:
                    since[life.last] = since.get(life.last, 0) + 1
                else:
                    self._first_token(life, now)
                life.last = now
        for last, count in since.items():
            self._histograms["inter_token_latency_seconds"].observe((now - last) * NS, count)
        self._counters["generation_tokens_total"] += generated

    def _admitted(self, life: _Life, num_cached: int, now: int) -> None:
        counters = self._counters
        counters["prefix_cache_queries_total"] += life.num_prompt + life.num_output
        counters["prefix_cache_hits_total"] += num_cached
        if life.scheduled:  # it had to yield, and is computed again
            counters["recomputed_tokens_total"] += max(0, life.lost - num_cached)
        else:
            life.scheduled = now
            counters["prompt_tokens_cached_total"] += num_cached

    def _first_token(self, life: _Life, now: int) -> None:
        life.first = now
        life.scheduled = life.scheduled or life.arrived
        self._observe("time_to_first_token_seconds", now - life.arrived)
        self._observe("request_queue_time_seconds", life.scheduled - life.arrived)
        self._observe("request_prefill_time_seconds", now - life.scheduled)
        self._counters["prompt_tokens_total"] += life.num_prompt

    def _ended(self, request_id: str, reason: str, now: int) -> None:
        life = self._lives.pop(request_id, None)
        if life is None:
            return
        if reason == "rejected":
            self._count("admission_rejections_total", reason)
            return
        self._count("request_success_total", reason)
        self._observe("e2e_request_latency_seconds", now - life.arrived)
        self._histograms["request_prompt_tokens"].observe(life.num_prompt)
        self._histograms["request_generation_tokens"].observe(life.num_output)
        if life.first:
            self._observe("request_decode_time_seconds", life.last - life.first)
        if life.num_output > 1:
            self._observe("request_time_per_output_token_seconds", (life.last - life.first) / (life.num_output - 1))

    def _observe(self, name: str, nanoseconds: float) -> None:
        self._histograms[name].observe(max(nanoseconds, 0) * NS)

    def _count(self, name: str, label: str) -> None:
        counts = self._labelled[name]
        counts[label] = counts.get(label, 0) + 1

    # -- telling -------------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        running, waiting, usage = self._gauges
        yield self._gauge("num_requests_running", "Requests that hold a slot.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a slot.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of cache blocks in use; 1 is all.", usage)
        for name, help_text in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            counter.add_metric([self._model_name], self._counters[name])
            yield counter
        for name, (label, help_text) in LABELLED.items():
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name", label])
            for value, count in self._labelled[name].items():
                counter.add_metric([self._model_name, value], count)
            yield counter
        for name, (_, help_text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            histogram = self._histograms[name]
            family.add_metric([self._model_name], histogram.cumulative(), histogram.total)
            yield family

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge

"""Names, help texts and buckets of the metrics, and their conversion to Prometheus' families.

Names and buckets are vLLM's where it has the metric, with the prefix `slotwise:`, so that a dashboard for one works for
the other after one substitution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from slotwise.observe.waste import KINDS, STALLS, WAITS

PREFIX = "slotwise:"
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP = (.001, .0025, .005, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10, 20)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(2**power for power in range(15))

FINISHED = ("stop", "length", "abort", "timeout", "shed", "error")

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
    "iteration_tokens_total": (STEP_TOKENS, "Tokens of requests computed in a step, padding not counted."),
}
STEP_TIME = "iteration_time_seconds"
STEP_TIME_HELP = "Time of a step, by what its rows were: decode, prefill (more than one token each) or both."

COUNTERS = {
    "num_preemptions_total": "Times a request lost its slot and its blocks.",
    "prompt_tokens_total": "Prompt tokens of requests that reached their first token.",
    "generation_tokens_total": "Tokens generated.",
    "prompt_tokens_cached_total": "Prompt tokens found in the cache when their request first took a slot.",
    "prefix_cache_queries_total": "Tokens looked for in the cache.",
    "prefix_cache_hits_total": "Tokens found in the cache, on the device.",
    "external_prefix_cache_hits_total": "Tokens found in host memory alone, and copied back to the device.",
    "recomputed_tokens_total": "Waste: tokens computed again because their request had to yield.",
    "padded_tokens_total": "Waste: tokens of padding computed, beside those in iteration_tokens_total.",
    "held_tokens_total": "Waste: tokens computed for rows that had ended and whose batch had not drained.",
    "slot_steps_total": "Slots there were, summed over steps.",
    "empty_slot_steps_total": "Waste: slots without a row, summed over steps.",
    "empty_slot_steps_waiting_total": "Those of empty_slot_steps_total at which a request waited for a slot.",
    "engine_starts_total": "Engine processes that became ready; more than one means that engines were lost.",
}


class Labelled(NamedTuple):
    label: str
    values: tuple[str, ...]  # shown from the start, at 0, so that a rate includes their first increase
    help: str


TO_HOST, TO_DEVICE = "GPU_to_CPU", "CPU_to_GPU"
LABELLED = {
    "kv_offload_total_bytes_total": Labelled(
        "transfer_type", (TO_HOST, TO_DEVICE), "Bytes of cache blocks copied to host memory, and back."),
    "request_success_total": Labelled("finished_reason", FINISHED, "Requests ended, by how."),
    "admission_rejections_total": Labelled("reason", (), "Requests refused, by why."),
    "request_wait_seconds_total": Labelled(
        "reason", WAITS, "Seconds that requests waited for a slot, by why, summed over requests."),
    "roofline_seconds_total": Labelled(
        "kind", KINDS, "Seconds that steps must have taken by their bytes and operations, at what the machine was "
        "measured to do; divided by the sum of iteration_time_seconds: how near they came."),
    "stalled_row_steps_total": Labelled(
        "reason", STALLS, "Running requests that had no row in a step, by why, summed over steps."),
}
GAUGES = {
    "num_requests_running": "Requests that hold a slot.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "kv_cache_usage_perc": "Share of cache blocks held by requests; 1 is all.",
    "max_num_seqs": "Slots in use.",
    "roofline_fraction": "Share of the time of the latest steps that the machine's limits explain; 1 is all of it.",
    "step_time_model_error": "Median of |predicted - taken| / taken over the latest steps that were learned from.",
    "engine_healthy": "1 while there is an engine that shows signs of life, else 0.",
}
WAITING = Labelled("reason", WAITS[1:], "Requests that wait for a slot, by why, in the last step planned.")


class Histogram:
    """Counts by upper bound; the last count is of the values above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Returns Prometheus' form: (upper bound, number of values up to it)."""
        pairs, below = [], 0
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            below += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), below))
        return pairs


def step_times() -> dict[str, Histogram]:
    """Returns one histogram for each kind of step."""
    return {kind: Histogram(STEP) for kind in KINDS}


class Shown:
    """Builds Prometheus' families, each sample labelled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def gauge(self, name: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, GAUGES[name], labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def info(self, name: str, help_text: str, facts: Mapping[str, object]) -> GaugeMetricFamily:
        """Returns a gauge of 1 whose labels are the information."""
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name", *facts])
        family.add_metric([self._model, *map(str, facts.values())], 1)
        return family

    def waiting(self, counts: Mapping[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason", WAITING.help, labels=["model_name", WAITING.label])
        for reason in dict.fromkeys((*WAITING.values, *counts)):
            family.add_metric([self._model, reason], counts.get(reason, 0))
        return family

    def counter(self, name: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def labelled(self, name: str, counts: Mapping[str, float]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            PREFIX + name, LABELLED[name].help, labels=["model_name", LABELLED[name].label])
        for value, count in counts.items():
            family.add_metric([self._model, value], count)
        return family

    def histogram(self, name: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][1], labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.total)
        return family

    def step_time(self, kinds: Iterable[tuple[str, Histogram]]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(PREFIX + STEP_TIME, STEP_TIME_HELP, labels=["model_name", "kind"])
        for kind, histogram in kinds:
            family.add_metric([self._model, kind], histogram.cumulative(), histogram.total)
        return family

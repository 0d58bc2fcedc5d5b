"""Prometheus metrics: their names, their fold over the entries of the event log, vLLM's names, the line about the load.

The fold's state is plain numbers; Prometheus' own objects are built when the metrics are read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from slotwise.core import cache_causes, reasons
from slotwise.core.reasons import WAITING_FOR_KV
from slotwise.core.record import Counters, StepRecord
from slotwise.core.speculation.speculation_settings import NUM_DRAFTS
from slotwise.engine.messages import Observer
from slotwise.engine.scheduling import Scheduling
from slotwise.observe import step_view
from slotwise.observe.event_log import Entry, Refusal, RequestEntry
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.lines import tell
from slotwise.observe.request_timeline import STEP_UNDER_WAY, RequestTimeline, num_of
from slotwise.observe.step_view import KINDS

if TYPE_CHECKING:
    from slotwise.core.step_time import Roofline
    from slotwise.engine.messages import EngineInfo

NS = 1e-9
LATELY = 256  # steps over which the roofline fraction is computed
EVERY = 10.0  # seconds between two log lines about the load

logger = logging.getLogger(__name__)


# Names, help texts and buckets of the metrics, and their conversion to Prometheus' families.
#
# Names and buckets are vLLM's where it has the metric, with the prefix `slotwise:`; `as_vllm` has the rest.

PREFIX = "slotwise:"
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP = (.001, .0025, .005, .01, .015, .02, .03, .04, .06, .08, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10, 20)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(2**power for power in range(15))
CHOICES = (1, 2, 5, 10, 20, 50, 100)

WAITS = (
    STEP_UNDER_WAY, reasons.NO_SLOT, reasons.NO_BLOCKS, reasons.TOKEN_BUDGET, reasons.SHORT_STEP, reasons.TIME_BUDGET,
    reasons.TIER_CAP, reasons.FIRST_TOKEN, reasons.BATCH_RUNNING, reasons.WINDOW_OPEN, reasons.ONE_AT_A_TIME,
    reasons.GRAMMAR_COMPILING, reasons.NO_ADAPTER_SLOT, reasons.WAITING_FOR_KV, reasons.LOAD_LIMIT,
    reasons.TOKEN_PENDING)
STALLS = (
    reasons.TOKEN_BUDGET, reasons.SHORT_STEP, reasons.TIME_BUDGET, reasons.FIRST_TOKEN,
    reasons.ENDING, reasons.VERIFYING, reasons.MICRO_BATCH, reasons.PROMPTS_ALONE)
FINISHED = ("stop", "length", "abort", "timeout", "shed", "error")

HISTOGRAMS = {
    "time_to_first_token_seconds": (TTFT, "Seconds from arrival, when the body was read whole, to the first token."),
    "inter_token_latency_seconds": (ITL, "Seconds between two tokens of a request."),
    "request_time_per_output_token_seconds": (ITL, "Mean seconds between the tokens of a request."),
    "e2e_request_latency_seconds": (LATENCY, "Seconds from arrival to the end."),
    "request_queue_time_seconds": (LATENCY, "Seconds from sending a request to the engine to its first step."),
    "request_inference_time_seconds": (LATENCY, "Seconds from the first step to the last token."),
    "request_prefill_time_seconds": (LATENCY, "Seconds from the first step to the first token."),
    "request_decode_time_seconds": (LATENCY, "Seconds from the first token to the last."),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of a request."),
    "request_generation_tokens": (TOKENS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (TOKENS, "Generated tokens of the longest of the choices of a prompt."),
    "request_prefill_kv_computed_tokens": (TOKENS, "Prompt tokens of a request that were not found in the cache."),
    "request_params_n": (CHOICES, "Choices of a prompt: the parameter n."),
    "request_params_max_tokens": (TOKENS, "Most tokens that a request may generate: the parameter max_tokens."),
    "iteration_tokens_total": (STEP_TOKENS, "Tokens of requests computed in a step, padding not counted."),
}
STEP_TIME = "iteration_time_seconds"
STEP_TIME_HELP = "Seconds of a step, by kind: every row decodes, every row has more than one token (prefill), or mixed."

COUNTERS = {
    "num_preemptions_total": "Preemptions: a request lost its slot and its blocks.",
    "prompt_tokens_total": "Prompt tokens of requests that reached their first token.",
    "generation_tokens_total": "Tokens generated.",
    "prompt_tokens_cached_total": "Prompt tokens found in the prefix cache at the first admission of their request.",
    "prefix_cache_queries_total": "Tokens of admitted requests, looked up in the prefix cache.",
    "prefix_cache_hits_total": "Tokens found in the prefix cache on the device.",
    "external_prefix_cache_queries_total": "Tokens looked up in host memory or on disk: those not found on the device.",
    "external_prefix_cache_hits_total": "Tokens found in host memory or on disk only, and copied back to the device.",
    "spec_decode_num_drafts_total": "Rows that verified drafts, summed over steps.",
    "spec_decode_num_draft_tokens_total": "Drafts verified.",
    "spec_decode_num_accepted_tokens_total": "Drafts that were right.",
    "recomputed_tokens_total": "Waste: tokens computed again after a preemption.",
    "padded_tokens_total": "Waste: padding tokens, computed in addition to those in iteration_tokens_total.",
    "held_tokens_total": "Waste: tokens computed for finished rows whose batch had not drained.",
    "slot_steps_total": "Slots, summed over steps.",
    "empty_slot_steps_total": "Waste: slots without a row, summed over steps.",
    "empty_slot_steps_waiting_total": "Part of empty_slot_steps_total: slots that were empty while requests waited.",
    "kv_prompts_sent_total": "Prompts whose blocks another engine has read, or no longer wants.",
    "engine_starts_total": "Engine processes that became ready; all but the first replaced a lost one.",
}


POSITIONS = tuple(map(str, range(NUM_DRAFTS)))  # of drafts


# The metrics under vLLM's names (`--vllm-metrics`), so that dashboards and alert rules for vLLM read this server.
#
# A metric of Slotwise has vLLM's name behind another prefix wherever vLLM has the metric, so most are only renamed.
# Source: `vllm/v1/metrics/loggers.py` of vLLM, and its dashboards in `examples/observability`.

VLLM_PREFIX = "vllm:"
ENGINE = {"engine": "0"}  # vLLM numbers the engines of a server; this one has one
BY_REASON, CACHE = "num_requests_waiting_by_reason", "cache_config_info"
NAMES = (  # as samples have them, without the suffixes of a histogram's
    "num_requests_running", "num_requests_waiting", BY_REASON, "kv_cache_usage_perc", CACHE, "num_preemptions_total",
    "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "generation_tokens_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total", "kv_offload_total_bytes_total", "request_success_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens",
    "request_params_n", "request_params_max_tokens", "iteration_tokens_total",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total", "lora_requests_info")
OLDER = {  # names that vLLM has given up, and that rules still have
    "kv_cache_usage_perc": "gpu_cache_usage_perc", "inter_token_latency_seconds": "time_per_output_token_seconds",
    "prefix_cache_queries_total": "gpu_prefix_cache_queries_total",
    "prefix_cache_hits_total": "gpu_prefix_cache_hits_total"}
CAPACITY = (reasons.NO_SLOT, reasons.NO_BLOCKS, reasons.TOKEN_BUDGET)
CAPACITY_OR_NOT = ("capacity", "deferred")  # vLLM's reasons: for a slot, blocks or tokens of the step; for all else
CACHE_LABELS = {"num_blocks": "num_gpu_blocks", "num_host_blocks": "num_cpu_blocks"}
ABSENT = {  # vLLM's metrics that are not served; `*` stands for any characters
    "prompt_tokens_recomputed_total": "The last token of a prompt is computed, and never counted as cached.",
    "prompt_tokens_cached_by_source_total": "`prompt_tokens_by_source_total` tells the device's cache "
                                            "(`local_cache_hit`) and the host's (`external_kv_transfer`) apart.",
    "corrupted_requests_total": "A request whose logits are not finite ends as `error` in `request_success_total`.",
    "mm_cache_*": "The server has text models only.",
    "engine_sleep_state": "`slotwise:sleep_level` is the level as a number, 0 while the model is awake.",
    "sleep_mode_operation_duration_seconds": "The log has the times of sleeps and wake-ups.",
    "rl_weight_update_operation_duration_seconds": "Weights are never changed.",
    "kv_block_*_seconds": "Cache blocks are not timed.",
    "estimated_*_per_gpu_total": "`slotwise:roofline_seconds_total` is the time that these operations and bytes take "
                                 "at least.",
    "kv_offload_*": "Of the host's cache, `kv_offload_total_bytes_total` is served: bytes by direction. Sizes, times "
                    "and look-ups of copies are not measured.",
    "simple_kv_offload_*": "As `kv_offload_*`.",
    "num_requests_kv_fetch_by_stage": "No request waits for a copy from the host's cache.",
    "nixl_*": "Servers exchange cache blocks over TCP; `kv_transfers_total` counts the prompts.",
    "http_*": "Exchanges are logged (`--access-log`), not counted.",
}


def as_vllm(family: Metric) -> Iterator[Metric]:
    """Yields a metric of Slotwise under each name that vLLM has, or had, for it."""
    samples = family.samples
    if family.name == PREFIX + BY_REASON:
        samples = _by_capacity(samples)
    elif family.name == PREFIX + CACHE:
        samples = [sample._replace(labels={CACHE_LABELS.get(name, name): value for name, value in
                                           sample.labels.items()}) for sample in samples]
    name = family.name.removeprefix(PREFIX)
    total = "_total" * (family.type == "counter")  # which a family's name lacks, and its samples' have
    if name + total not in NAMES:
        return
    for theirs in filter(None, (name, OLDER.get(name + total, "").removesuffix(total))):
        renamed = Metric(VLLM_PREFIX + theirs, family.documentation, family.type)
        renamed.samples = [sample._replace(
            name=VLLM_PREFIX + theirs + sample.name.removeprefix(family.name), labels=sample.labels | ENGINE)
            for sample in samples]
        yield renamed


def _by_capacity(samples: list[Sample]) -> list[Sample]:
    """The numbers of waiting requests by vLLM's two reasons."""
    counts = dict.fromkeys(CAPACITY_OR_NOT, 0.0)
    for sample in samples:
        counts[CAPACITY_OR_NOT[sample.labels["reason"] not in CAPACITY]] += sample.value
    return [samples[0]._replace(labels=samples[0].labels | {"reason": reason}, value=count)
            for reason, count in counts.items()]


class Labeled(NamedTuple):
    label: str
    values: tuple[str, ...]  # shown from the start, at 0, so that a rate includes their first increase
    help: str


TO_HOST, TO_DEVICE = "GPU_to_CPU", "CPU_to_GPU"
COMPLETE, INCOMPLETE = "complete", "incomplete"  # transfers of prompts
DISK_EVENTS = ("written", "read", "dropped", "damaged")
COMPUTED, ON_DEVICE, ELSEWHERE = SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
LABELED = {
    "prompt_tokens_by_source_total": Labeled(
        "source", SOURCES, "Prompt tokens at the first admission of their request: to be computed, found in the prefix "
        "cache on the device, found in host memory or on disk."),
    "prompt_tokens_by_cause_total": Labeled(
        "cause", cache_causes.CAUSES, "Prompt tokens at the first admission of their request, by why the prefix cache "
        "had them, or had not."),
    "kv_offload_total_bytes_total": Labeled(
        "transfer_type", (TO_HOST, TO_DEVICE), "Bytes of cache blocks copied to host memory and back, by direction."),
    "request_success_total": Labeled("finished_reason", FINISHED, "Finished requests, by reason."),
    "admission_rejections_total": Labeled("reason", (), "Refused requests, by reason."),
    "request_wait_seconds_total": Labeled(
        "reason", WAITS, "Seconds that requests waited for a slot, summed over requests, by reason."),
    "spec_decode_num_accepted_tokens_per_pos_total": Labeled(
        "position", POSITIONS, "Drafts that were right, by their position among the drafts of their row."),
    "roofline_seconds_total": Labeled(
        "kind", KINDS, "Lower bound of the seconds of steps, from their bytes and operations and the measured rates of "
        "the machine; divided by iteration_time_seconds_sum it is the achieved share."),
    "rank_busy_seconds_total": Labeled(
        "rank", (), "Seconds in which each rank worked on steps, where several processes compute the model; waits of a "
        "pipeline's stage for the one before it are not counted."),
    "expert_tokens_total": Labeled(
        "layer", (), "Tokens times the experts that each chose, by layer with experts; padding and drafts count, too."),
    "kv_transfers_total": Labeled(
        "outcome", (COMPLETE, INCOMPLETE), "Prompts that came from another engine: all of their blocks arrived, or the "
        "others were computed here."),
    "kv_disk_blocks_total": Labeled(
        "event", DISK_EVENTS, "Cache blocks on disk, as of the last step: written; read in place of being computed; "
        "dropped, because too many waited, their memory was needed or the disk failed; found damaged and removed."),
    "stalled_row_steps_total": Labeled(
        "reason", STALLS, "Running requests without a row in a step, summed over steps, by reason."),
}
GAUGES = {
    "num_requests_running": "Requests with a slot.",
    "num_requests_waiting": "Requests that wait for a slot, preempted ones included.",
    "num_requests_waiting_for_kv": "Requests that wait for blocks from another engine or from disk.",
    "kv_disk_bytes": "Size of all cache blocks on disk in bytes, those of other models included, as of the last step.",
    "kv_pinned_blocks": "Blocks of ended requests that another engine still reads.",
    "kv_cache_usage_perc": "Share of cache blocks that requests reference, from 0 to 1.",
    "max_num_seqs": "Slots in use.",
    "roofline_fraction": "Achieved share of the roofline over the latest steps, from 0 to 1.",
    "step_time_model_error": "Median of |predicted - taken| / taken over the latest steps of the step-time model.",
    "sleep_level": "0 while the model is awake; 1 where it sleeps without its cache, 2 where the engine has ended.",
    "engine_healthy": "1 while an engine is attached and responsive, else 0.",
}
BY_LAYER = {  # gauges labeled with the layer, of models with mixtures of experts
    "expert_imbalance": "Tokens of the layer's busiest expert per mean of its experts, over the latest minute of work: "
                        "1 where all have equally many, 0 before the first.",
    "idle_experts": "Experts of the layer that no token chose in the latest minute of work.",
}
LAYER = "layer"
LORA_REQUESTS = "The names of adapters of running and of waiting requests, as labels; only with --enable-lora."
WAITING = Labeled("reason", WAITS[1:], "Requests that wait for a slot in the last planned step, by reason.")


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
    """Builds Prometheus' families, each sample labeled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name

    def gauge(self, name: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily, name, GAUGES[name], [], {"": value})

    def info(self, name: str, help_text: str, facts: Mapping[str, object], value: float = 1) -> Metric:
        """Returns a gauge whose labels are the information."""
        family = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name", *facts])
        family.add_metric([self._model, *map(str, facts.values())], value)
        return family

    def waiting(self, counts: Mapping[str, int]) -> Metric:
        shown = {reason: counts.get(reason, 0) for reason in dict.fromkeys((*WAITING.values, *counts))}
        return self._filled(GaugeMetricFamily, "num_requests_waiting_by_reason", WAITING.help, [WAITING.label], shown)

    def by_layer(self, name: str, values: Mapping[str, float]) -> Metric:
        return self._filled(GaugeMetricFamily, name, BY_LAYER[name], [LAYER], values)

    def counter(self, name: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily, name, COUNTERS[name], [], {"": value})

    def labeled(self, name: str, counts: Mapping[str, float]) -> Metric:
        return self._filled(CounterMetricFamily, name, LABELED[name].help, [LABELED[name].label], counts)

    def histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][1], labels=["model_name"])
        family.add_metric([self._model], histogram.cumulative(), histogram.total)
        return family

    def step_time(self, kinds: Iterable[tuple[str, Histogram]]) -> Metric:
        family = HistogramMetricFamily(PREFIX + STEP_TIME, STEP_TIME_HELP, labels=["model_name", "kind"])
        for kind, histogram in kinds:
            family.add_metric([self._model, kind], histogram.cumulative(), histogram.total)
        return family

    def _filled(self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, help_text: str,
                label: list[str], values: Mapping[str, float]) -> Metric:
        """Returns a family with a value for each value of the label, if it has one."""
        filled = family(PREFIX + name, help_text, labels=["model_name", *label])
        for labeled, value in values.items():
            filled.add_metric([self._model, labeled][: 1 + len(label)], value)
        return filled


# The periodic log line under load: rates, running and waiting requests, the cache, and why requests wait.


class LoadLine:
    """Rates since the last line, from the counters of `/metrics`."""

    COUNTED = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
               "prefix_cache_hits_total", "num_preemptions_total")

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._then, self._counted, self._waits, self._ended = now, *self._read()

    def _read(self) -> tuple[dict[str, int], dict[str, float], float]:
        metrics = self._metrics
        return ({name: metrics.counters[name] for name in self.COUNTED}, metrics.wait_seconds,
                sum(metrics.labeled["request_success_total"].values()))

    def fields(self, now: float) -> dict[str, Any]:
        """Returns the fields of a line; rates are per second since the last call, `now` in seconds; empty when idle."""
        counted, waits, ended = self._read()
        seconds = max(now - self._then, 1e-9)
        since = {name: counted[name] - self._counted[name] for name in self.COUNTED}
        waited = {reason: waited - self._waits.get(reason, 0.0) for reason, waited in waits.items()}
        finished = ended - self._ended
        self._then, self._counted, self._waits, self._ended = now, counted, waits, ended
        now_is = self._metrics.timelines
        if not (any(since.values()) or finished or now_is.num_running or now_is.num_waiting):
            return {}
        queries = since["prefix_cache_queries_total"]
        return {
            "running": now_is.num_running, "waiting": now_is.num_waiting,
            "prompt_tokens_per_s": round(since["prompt_tokens_total"] / seconds, 1),
            "generation_tokens_per_s": round(since["generation_tokens_total"] / seconds, 1),
            "requests_per_s": round(finished / seconds, 2),
            "kv_cache_usage": round(now_is.usage, 3),
            "prefix_cache_hit_rate": round(since["prefix_cache_hits_total"] / queries, 3) if queries else None,
            "preemptions": since["num_preemptions_total"],
            "waited_s": {reason: round(waited, 2) for reason, waited in waited.items() if waited >= 0.01}}


def sentence(fields: Mapping[str, Any]) -> str:
    """Returns the fields as a text line."""
    parts = [
        f"{fields['running']} running, {fields['waiting']} waiting",
        f"{fields['generation_tokens_per_s']:,.1f} tokens/s out, {fields['prompt_tokens_per_s']:,.1f} in, "
        f"{fields['requests_per_s']:.2f} requests/s",
        f"cache {fields['kv_cache_usage']:.0%} in use"]
    if fields["prefix_cache_hit_rate"] is not None:
        parts.append(f"{fields['prefix_cache_hit_rate']:.0%} of tokens found in it")
    if fields["preemptions"]:
        parts.append(f"{fields['preemptions']} preempted")
    if waited := fields["waited_s"]:
        whole = sum(waited.values())
        shares = sorted(waited.items(), key=lambda share: -share[1])
        parts.append("waited for " + ", ".join(f"{reason} {seconds / whole:.0%}" for reason, seconds in shares[:3]))
    return "; ".join(parts)


async def report(metrics: Metrics, every: float = EVERY) -> None:
    """Logs a line every `every` seconds unless idle; runs until cancelled."""
    line = LoadLine(metrics, time.monotonic())
    while True:
        await asyncio.sleep(every)
        if fields := line.fields(time.monotonic()):
            tell(logger, sentence(fields), fields)


# How a model's experts share the tokens: by layer, since the engine started and lately.
#
# A layer in which all experts have equally many tokens has an imbalance of 1; one whose tokens all go to the same
# `top_k` experts has `num_experts / top_k`.  A step that reads few weights for its tokens is short, so imbalance costs
# little while steps are bound by memory; where experts are spread over devices, the busiest one sets the time.

EXPERT_COUNTS = 60  # counts that `imbalance` and `idle` look at: one a second while there is work, and one at its end

Counts = Sequence[Sequence[int]]
"""Tokens of each expert of each layer."""


class ExpertLoad:
    """A fold over the counts of step records.

    Args:
        layers: numbers of the layers with experts.
    """

    def __init__(self, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._all: list[list[int]] = [[] for _ in layers]
        self._lately: list[list[int]] = [[] for _ in layers]
        self._latest: deque[Counts] = deque()

    def add(self, counts: Counts) -> None:
        """Adds what one record has, a row for each of `layers`."""
        self._all, self._lately = _sum(self._all, counts), _sum(self._lately, counts)
        self._latest.append(counts)
        if len(self._latest) > EXPERT_COUNTS:
            self._lately = [list(map(sub, *rows)) for rows in zip(self._lately, self._latest.popleft(), strict=True)]

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens times the experts that each chose, by layer."""
        return {str(layer): sum(row) for layer, row in zip(self.layers, self._all, strict=True)}

    @property
    def imbalance(self) -> dict[str, float]:
        """Tokens of the busiest expert per mean of all lately, by layer; 0 where there are none."""
        return {str(layer): _imbalance(row) for layer, row in zip(self.layers, self._lately, strict=True)}

    @property
    def idle(self) -> dict[str, int]:
        """Experts that no token chose lately, by layer."""
        return {str(layer): row.count(0) for layer, row in zip(self.layers, self._lately, strict=True)}

    def table(self) -> list[dict[str, Any]]:
        """Everything, as JSON has it: a layer's experts in order."""
        return [
            {"layer": layer, "tokens": whole, "tokens_lately": lately, "imbalance_lately": _imbalance(lately)}
            for layer, whole, lately in zip(self.layers, self._all, self._lately, strict=True)]


def _sum(totals: Counts, counts: Counts) -> list[list[int]]:
    return [list(map(add, total, row)) if total else list(row) for total, row in zip(totals, counts, strict=True)]


def _imbalance(row: Sequence[int]) -> float:
    return max(row) * len(row) / total if (total := sum(row)) else 0.0


# Finds the choices (`n`) of each prompt, which the engine runs as requests of their own.
#
# The requests of a response arrive in the order of its prompts, those of other responses in between.


@dataclass(slots=True)
class _Prompt:
    response: tuple[int, str]
    num_arrived: int = 0
    num_ended: int = 0
    longest: int = 0  # tokens


class PromptChoices:
    """The prompts with several choices that have not all ended.  Memory is bounded by the unfinished requests."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[int, str], _Prompt] = {}  # by response: the prompt whose next choice is to come
        self._prompts: dict[int, _Prompt] = {}  # by the number of a request

    def arrived(self, request: RequestEntry) -> None:
        """Notes a request, in order of arrival."""
        if request.spec.params.n == 1:
            return
        response = request.timing.received_ns, request.id.rpartition("-")[0]
        prompt = self._arriving.setdefault(response, _Prompt(response))
        prompt.num_arrived += 1
        if prompt.num_arrived == request.spec.params.n:
            del self._arriving[response]
        self._prompts[request.number] = prompt

    def ended(self, request: RequestEntry, num_output: int) -> int | None:
        """Notes the end of a request.  Returns the most tokens of a choice of its prompt if it was the last to end."""
        if request.spec.params.n == 1:
            return num_output
        if (prompt := self._prompts.pop(request.number, None)) is None:
            return None
        prompt.num_ended += 1
        prompt.longest = max(prompt.longest, num_output)
        if prompt.num_ended == request.spec.params.n:
            return prompt.longest
        if prompt.num_ended == prompt.num_arrived:  # the others were refused, and never come
            self._arriving.pop(prompt.response, None)
        return None


class Metrics(Collector, Observer):
    """Reads the entries of a recorder and provides the samples of `/metrics`; observes which engine serves.

    Args:
        model_name: the label on every sample.
        info: of the ready engine.
        timelines: the recorder's.
        healthy: whether a responsive engine is attached.
        has_vllm_names: metrics that vLLM has are there under its names, too.
    """

    def __init__(self, model_name: str, info: EngineInfo, timelines: Timelines,
                 healthy: Callable[[], bool] = lambda: True, *, has_vllm_names: bool = False) -> None:
        self._shown = Shown(model_name)
        self._has_vllm_names = has_vllm_names
        self.extra_gauges: dict[str, Callable[[], float]] = {}  # gauges of other components
        self.timelines = timelines
        self._healthy = healthy
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.labeled: dict[str, dict[str, float]] = {
            name: dict.fromkeys(labeled.values, 0) for name, labeled in LABELED.items()}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self._step_times = step_times()
        self._lately: deque[tuple[float, float]] = deque(maxlen=LATELY)  # roofline and measured seconds of steps
        self.started(info)

    @property
    def wait_seconds(self) -> dict[str, float]:
        """Seconds that requests waited for a slot, by reason, summed over requests."""
        waited = {reason: ns * NS for reason, ns in self.timelines.waiting.waited_ns().items()}
        return dict.fromkeys(WAITS, 0.0) | waited

    @property
    def roofline_fraction(self) -> float:
        """Roofline seconds per measured second of the latest steps; 0 before the first."""
        taken = sum(seconds for _, seconds in self._lately)
        return sum(bound for bound, _ in self._lately) / taken if taken > 0 else 0.0

    # -- observing -----------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        """Another engine is ready."""
        self._info = info
        self.experts = ExpertLoad(info.expert_layers)
        self._slots = info.scheduling.max_num_seqs
        self._counters = Counters()  # of the last record
        self._disk_bytes = 0
        self._last_end = 0  # of a step with rows
        self._choices = PromptChoices()
        self.counters["engine_starts_total"] += 1

    def stepped(self, record: StepRecord) -> None:
        """Counts what records have and entries have not."""
        if record.counters.expert_tokens:
            self.experts.add(record.counters.expert_tokens)
        self._counters = record.counters

    def write(self, entry: Entry, changes: Changes) -> None:
        """Counts an entry that made these changes.  Never waits."""
        if isinstance(entry, Refusal):
            self._count("admission_rejections_total", entry.reason)
        elif isinstance(entry, RequestEntry):
            self._choices.arrived(entry)
        elif isinstance(entry, StepRecord):
            self._requests(entry, changes)
            if entry.plans:
                self._tiers(entry, changes)
            if entry.plan.counts:
                self._step(entry)
            if isinstance(entry.inputs.configured, Scheduling):
                self._slots = entry.inputs.configured.max_num_seqs

    def _requests(self, step: StepRecord, changes: Changes) -> None:
        """Counts what happened to requests."""
        self.counters["num_preemptions_total"] += len(step.preempted)
        self.counters["generation_tokens_total"] += changes.num_tokens
        for timeline, _ in changes.admitted:
            if timeline.num_preemptions:  # it is recomputed
                self.counters["recomputed_tokens_total"] += max(0, timeline.lost - timeline.cached)
            else:
                self.counters["prompt_tokens_cached_total"] += timeline.cached
                start = 0
                for span in timeline.prompt_spans:
                    self._count("prompt_tokens_by_cause_total", span.cause, span.end - start)
                    start = span.end
        for timeline in changes.first_tokens:
            self._first_token(timeline)
        for ns, rows in changes.gaps.items():
            self._histograms["inter_token_latency_seconds"].observe(ns * NS, rows)
        for arrival in step.inputs.arrivals:
            if arrival.is_last:
                self._count("kv_transfers_total", INCOMPLETE if arrival.failure else COMPLETE)
        self.counters["kv_prompts_sent_total"] += len(step.inputs.acknowledged)
        if (disk := step.inputs.disk) is not None:
            self._disk_bytes = disk.num_bytes
            numbers = disk.num_written, disk.num_read, disk.num_dropped, disk.num_damaged
            for event, number in zip(DISK_EVENTS, numbers, strict=True):
                self._count("kv_disk_blocks_total", event, number)
        for timeline, end in changes.ended:
            self._ended(timeline, end.reason, step.ended_ns)

    def _first_token(self, timeline: RequestTimeline) -> None:
        first = timeline.first_token_ns
        self._observe("time_to_first_token_seconds", first - timeline.arrived_ns)
        self._observe("request_queue_time_seconds", timeline.admitted_ns - timeline.request.ns)
        self._observe("request_prefill_time_seconds", first - timeline.admitted_ns)
        self.counters["prompt_tokens_total"] += timeline.request.num_prompt

    def _ended(self, timeline: RequestTimeline, reason: str, now: int) -> None:
        request, num_output = timeline.request, timeline.num_published
        longest = self._choices.ended(request, num_output)
        if reason == "rejected":
            self._count("admission_rejections_total", reason)
            return
        self._count("request_success_total", reason)
        self._observe("e2e_request_latency_seconds", now - timeline.arrived_ns)
        self._number("request_prompt_tokens", request.num_prompt)
        self._number("request_generation_tokens", num_output)
        self._number("request_params_max_tokens", request.spec.params.max_tokens)
        if longest is not None:
            self._number("request_max_num_generation_tokens", longest)
            self._number("request_params_n", request.spec.params.n)
        if timeline.first_token_ns:
            decoding = timeline.last_token_ns - timeline.first_token_ns
            self._observe("request_inference_time_seconds", timeline.last_token_ns - timeline.admitted_ns)
            self._observe("request_decode_time_seconds", decoding)
            self._number("request_prefill_kv_computed_tokens",
                         request.num_prompt - timeline.num_cached - timeline.num_received)
            if num_output > 1:
                self._observe("request_time_per_output_token_seconds", decoding / (num_output - 1))

    def _tiers(self, step: StepRecord, changes: Changes) -> None:
        """Counts the prefix hits of each tier and the copies between them."""
        limits, counters, admitted = self._info.limits, self.counters, step.admitted
        num_saves, num_loads = sum([len(plan.saves) for plan in step.plans]), sum([len(plan.loads)
                                                                                   for plan in step.plans])
        if not (num_saves or admitted):
            return
        from_host, from_disk = [sum([num_of(cause, lookup.spans) for lookup in step.lookups])
                                for cause in (cache_causes.FOUND_IN_HOST, cache_causes.FOUND_ON_DISK)]
        loaded = from_host + from_disk
        on_device = sum([cached for _, cached in admitted]) - loaded
        queries = sum([num_known for _, num_known in changes.admitted])
        counters["prefix_cache_queries_total"] += queries
        counters["prefix_cache_hits_total"] += on_device
        if limits.num_host_blocks or self._info.has_disk:
            counters["external_prefix_cache_queries_total"] += queries - on_device
            counters["external_prefix_cache_hits_total"] += loaded
        self._sources([timeline for timeline, _ in changes.admitted if not timeline.num_preemptions], loaded)
        block_bytes = self._info.memory.host // max(1, limits.num_host_blocks)
        self._count("kv_offload_total_bytes_total", TO_HOST, num_saves * block_bytes)
        self._count("kv_offload_total_bytes_total", TO_DEVICE, num_loads * block_bytes)

    def _sources(self, new: Sequence[RequestTimeline], loaded: int) -> None:
        """Counts where the prompt tokens of new requests come from.

        What a step has loaded is not told by request: it is taken to be theirs, not that of requests that return.
        """
        found, received = sum([timeline.cached for timeline in new]), sum([timeline.num_received for timeline in new])
        from_host = min(found, loaded)
        self._count("prompt_tokens_by_source_total", COMPUTED,
                    sum([one.request.num_prompt for one in new]) - found - received)
        self._count("prompt_tokens_by_source_total", ON_DEVICE, found - from_host)
        self._count("prompt_tokens_by_source_total", ELSEWHERE, from_host + received)

    def _step(self, step: StepRecord) -> None:
        """Observes a step's time and waste.  The executor starts a step when the previous one has ended."""
        counters, rows = self.counters, len(step.plan.counts)
        kind, seconds = step_view.kind(step), (step.ended_ns - max(step.started_ns, self._last_end)) * NS
        self._last_end = step.ended_ns
        self._step_times[kind].observe(seconds)
        if self._info.roofline is not None:
            self._hold_against(self._info.roofline, step, kind, seconds)
        self._histograms["iteration_tokens_total"].observe(sum(step.plan.counts))
        if step.plan.drafts:
            self._drafts(step)
        for rank, started, ended in step.result.ranks:
            self._count("rank_busy_seconds_total", str(rank), (ended - started) * NS)
        counters["padded_tokens_total"] += sum(step.plan.padding)
        counters["held_tokens_total"] += step_view.held_tokens(step)
        empty = max(0, self._slots - rows)
        counters["slot_steps_total"] += empty + rows
        counters["empty_slot_steps_total"] += empty
        counters["empty_slot_steps_waiting_total"] += empty * (step.plan.stop is not None)
        for timeline in self.timelines.stalled:
            self._count("stalled_row_steps_total", timeline.reason)

    def _drafts(self, step: StepRecord) -> None:
        for num_drafts, num_right in step.verified:
            self.counters["spec_decode_num_drafts_total"] += 1
            self.counters["spec_decode_num_draft_tokens_total"] += num_drafts
            self.counters["spec_decode_num_accepted_tokens_total"] += num_right
            for position in range(num_right):
                self._count("spec_decode_num_accepted_tokens_per_pos_total", str(position))

    def _hold_against(self, roofline: Roofline, step: StepRecord, kind: str, seconds: float) -> None:
        """Counts a step's bound, at most its seconds: rates that were measured next to other programs are too low."""
        sampled = len(step.tokens) - step.tokens.count(())
        bound = min(seconds, roofline.seconds(roofline.cost(step.plan.starts, step.plan.counts, sampled)))
        self.labeled["roofline_seconds_total"][kind] += bound
        self._lately.append((bound, seconds))

    def _observe(self, name: str, nanoseconds: float) -> None:
        self._histograms[name].observe(max(nanoseconds, 0) * NS)

    def _number(self, name: str, number: int | None) -> None:
        if number is not None:
            self._histograms[name].observe(number)

    def _count(self, name: str, label: str, times: float = 1) -> None:
        counts = self.labeled[name]
        counts[label] = counts.get(label, 0) + times

    # -- exposition ----------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus' text format, with those that Prometheus' clients have of any process."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            yield family
            if self._has_vllm_names:
                yield from as_vllm(family)

    def _adapters(self) -> Metric:
        """The adapters of unfinished requests, as labels; the value is the time, by which vLLM's readers sort them."""
        names: dict[bool, set[str]] = {True: set(), False: set()}  # by whether their requests wait
        for timeline in self.timelines.by_number.values():
            if timeline.request.spec.adapter_name and not timeline.ended:
                names[timeline.is_waiting].add(timeline.request.spec.adapter_name)
        return self._shown.info("lora_requests_info", LORA_REQUESTS, {
            "max_lora": self._info.limits.max_loras, "running_lora_adapters": ",".join(sorted(names[False])),
            "waiting_lora_adapters": ",".join(sorted(names[True]))}, time.time())

    def _families(self) -> Iterator[Metric]:
        shown, info = self._shown, self._info
        limits = info.limits
        yield shown.info("engine_info", "The engine's settings, as labels of a 1.", {
            "device": info.device, "dtype": info.dtype, "max_model_len": limits.max_model_len})
        yield shown.info("cache_config_info", "The cache's settings, as labels of a 1.", {
            "block_size": limits.block_size, "cache_dtype": info.cache_dtype, "num_blocks": limits.num_blocks,
            "enable_prefix_caching": limits.enable_prefix_caching, "num_host_blocks": limits.num_host_blocks})
        if info.max_adapters:
            yield self._adapters()
        yield shown.gauge("engine_healthy", self._healthy())
        yield shown.gauge("num_requests_running", self.timelines.num_running)
        yield shown.gauge("num_requests_waiting", self.timelines.num_waiting)
        by_reason = self.timelines.waiting.by_reason()
        yield shown.waiting(by_reason)
        yield shown.gauge("num_requests_waiting_for_kv", by_reason.get(WAITING_FOR_KV, 0))
        yield shown.gauge("kv_disk_bytes", self._disk_bytes)
        yield shown.gauge("kv_pinned_blocks", self._counters.num_pinned_blocks)
        yield shown.gauge("kv_cache_usage_perc", self.timelines.usage)
        yield shown.gauge("max_num_seqs", self._slots)
        yield shown.gauge("roofline_fraction", self.roofline_fraction)
        for name, value in self.extra_gauges.items():
            yield shown.gauge(name, value())
        for name, count in self.counters.items():
            yield shown.counter(name, count)
        elsewhere = {"request_wait_seconds_total": self.wait_seconds, "expert_tokens_total": self.experts.tokens}
        for name, counts in (self.labeled | elsewhere).items():
            yield shown.labeled(name, counts)
        yield shown.by_layer("expert_imbalance", self.experts.imbalance)
        yield shown.by_layer("idle_experts", self.experts.idle)
        for name, histogram in self._histograms.items():
            yield shown.histogram(name, histogram)
        yield shown.step_time(self._step_times.items())

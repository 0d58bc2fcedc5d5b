"""Names, help texts and buckets of the metrics, and their conversion to Prometheus' families.

Names and buckets are vLLM's where it has the metric, with the prefix `slotwise:`; `observe.series` has the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from slotwise.core import reasons
from slotwise.observe.request_timeline import STEP_UNDER_WAY
from slotwise.observe.step_view import KINDS
from slotwise.speculation.speculation_settings import NUM_DRAFTS

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
    reasons.GRAMMAR_COMPILING, reasons.NO_ADAPTER_SLOT, reasons.WAITING_FOR_KV)
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
    "external_prefix_cache_queries_total": "Tokens looked up in host memory: those not found on the device.",
    "external_prefix_cache_hits_total": "Tokens found in host memory only, and copied back to the device.",
    "spec_decode_num_drafts_total": "Rows that verified drafts, summed over steps.",
    "spec_decode_num_draft_tokens_total": "Drafts verified.",
    "spec_decode_num_accepted_tokens_total": "Drafts that were right.",
    "recomputed_tokens_total": "Waste: tokens computed again after a preemption.",
    "padded_tokens_total": "Waste: padding tokens, computed beside those in iteration_tokens_total.",
    "held_tokens_total": "Waste: tokens computed for finished rows whose batch had not drained.",
    "slot_steps_total": "Slots, summed over steps.",
    "empty_slot_steps_total": "Waste: slots without a row, summed over steps.",
    "empty_slot_steps_waiting_total": "Part of empty_slot_steps_total: slots that were empty while requests waited.",
    "kv_prompts_sent_total": "Prompts whose blocks another engine has read, or does not want any more.",
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
    "nixl_*": "Servers exchange no cache blocks.",
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


class Labelled(NamedTuple):
    label: str
    values: tuple[str, ...]  # shown from the start, at 0, so that a rate includes their first increase
    help: str


TO_HOST, TO_DEVICE = "GPU_to_CPU", "CPU_to_GPU"
COMPLETE, INCOMPLETE = "complete", "incomplete"  # transfers of prompts
COMPUTED, ON_DEVICE, IN_HOST = SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
LABELLED = {
    "prompt_tokens_by_source_total": Labelled(
        "source", SOURCES, "Prompt tokens at the first admission of their request: to be computed, found in the prefix "
        "cache on the device, found in host memory."),
    "kv_offload_total_bytes_total": Labelled(
        "transfer_type", (TO_HOST, TO_DEVICE), "Bytes of cache blocks copied to host memory and back, by direction."),
    "request_success_total": Labelled("finished_reason", FINISHED, "Finished requests, by reason."),
    "admission_rejections_total": Labelled("reason", (), "Refused requests, by reason."),
    "request_wait_seconds_total": Labelled(
        "reason", WAITS, "Seconds that requests waited for a slot, summed over requests, by reason."),
    "spec_decode_num_accepted_tokens_per_pos_total": Labelled(
        "position", POSITIONS, "Drafts that were right, by their position among the drafts of their row."),
    "roofline_seconds_total": Labelled(
        "kind", KINDS, "Lower bound of the seconds of steps, from their bytes and operations and the measured rates of "
        "the machine; divided by iteration_time_seconds_sum it is the achieved share."),
    "rank_busy_seconds_total": Labelled(
        "rank", (), "Seconds in which each rank worked on steps, where several processes compute the model; waits of a "
        "pipeline's stage for the one before it are not counted."),
    "expert_tokens_total": Labelled(
        "layer", (), "Tokens times the experts that each chose, by layer with experts; padding and drafts count, too."),
    "kv_transfers_total": Labelled(
        "outcome", (COMPLETE, INCOMPLETE), "Prompts that came from another engine: all of their blocks arrived, or the "
        "others were computed here."),
    "stalled_row_steps_total": Labelled(
        "reason", STALLS, "Running requests without a row in a step, summed over steps, by reason."),
}
GAUGES = {
    "num_requests_running": "Requests with a slot.",
    "num_requests_waiting": "Requests that wait for a slot, preempted ones included.",
    "num_requests_waiting_for_kv": "Requests whose prompts another engine computes, and that have not arrived.",
    "kv_pinned_blocks": "Blocks of ended requests that another engine still reads.",
    "kv_cache_usage_perc": "Share of cache blocks that requests reference, from 0 to 1.",
    "max_num_seqs": "Slots in use.",
    "roofline_fraction": "Achieved share of the roofline over the latest steps, from 0 to 1.",
    "step_time_model_error": "Median of |predicted - taken| / taken over the latest steps of the step-time model.",
    "sleep_level": "0 while the model is awake; 1 where it sleeps without its cache, 2 where the engine has ended.",
    "engine_healthy": "1 while an engine is attached and responsive, else 0.",
}
BY_LAYER = {  # gauges labelled with the layer, of models with mixtures of experts
    "expert_imbalance": "Tokens of the layer's busiest expert per mean of its experts, over the latest minute of work: "
                        "1 where all have equally many, 0 before the first.",
    "idle_experts": "Experts of the layer that no token chose in the latest minute of work.",
}
LAYER = "layer"
LORA_REQUESTS = "The names of adapters of running and of waiting requests, as labels; only with --enable-lora."
WAITING = Labelled("reason", WAITS[1:], "Requests that wait for a slot in the last planned step, by reason.")


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

    def labelled(self, name: str, counts: Mapping[str, float]) -> Metric:
        return self._filled(CounterMetricFamily, name, LABELLED[name].help, [LABELLED[name].label], counts)

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
        for labelled, value in values.items():
            filled.add_metric([self._model, labelled][: 1 + len(label)], value)
        return filled

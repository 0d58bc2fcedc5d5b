"""The metrics under vLLM's names (`--vllm-metrics`), so that dashboards and alert rules for vLLM read this server.

A metric of Slotwise has vLLM's name behind another prefix wherever vLLM has the metric, so most are only renamed.
Source: `vllm/v1/metrics/loggers.py` of vLLM, and its dashboards in `examples/observability`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from slotwise.core import reasons
from slotwise.observe.series import PREFIX

VLLM_PREFIX = "vllm:"
ENGINE = {"engine": "0"}  # vLLM numbers the engines of a server; this one has one
WAITING, CACHE = "num_requests_waiting_by_reason", "cache_config_info"
NAMES = (  # as samples have them, without the suffixes of a histogram's
    "num_requests_running", "num_requests_waiting", WAITING, "kv_cache_usage_perc", CACHE, "num_preemptions_total",
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
    if family.name == PREFIX + WAITING:
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

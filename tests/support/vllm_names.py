"""Names of metrics in vLLM's dashboards and in its code, as in github.com/vllm-project/vllm, separated by spaces."""

from __future__ import annotations

# Sample names in the expressions of examples/observability/prometheus_grafana/grafana.json (commit 4b5c627c).
DASHBOARD = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count
vllm:num_requests_running vllm:num_requests_waiting
vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum vllm:time_to_first_token_seconds_count
vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum
"""

# Further names in its predecessor, examples/online_serving/prometheus_grafana/grafana.json (commit 004f771f).
OLD_DASHBOARD = """
vllm:time_per_output_token_seconds_bucket vllm:time_per_output_token_seconds_sum
vllm:time_per_output_token_seconds_count vllm:gpu_cache_usage_perc
"""

# Further names in examples/observability/dashboards/grafana: performance_statistics.json, query_statistics.json, and
# those in vllm_overview.json and vllm_kv_cache.json (tools/generate_grafana_dashboards.py, commit 0b9faa41) that need
# no option of vLLM's.
STATISTICS = """
vllm:iteration_tokens_total_count vllm:iteration_tokens_total_sum vllm:iteration_tokens_total_bucket
vllm:request_time_per_output_token_seconds_bucket vllm:request_time_per_output_token_seconds_count
vllm:request_queue_time_seconds_bucket vllm:num_requests_waiting_by_reason vllm:num_preemptions_total
vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total vllm:external_prefix_cache_hits_total
vllm:external_prefix_cache_queries_total vllm:prompt_tokens_by_source_total vllm:prompt_tokens_cached_total
vllm:request_prefill_kv_computed_tokens_sum vllm:cache_config_info process_cpu_seconds_total
process_resident_memory_bytes process_open_fds process_max_fds process_start_time_seconds
"""

# What vllm/v1/metrics/loggers.py defines, and further names in all these dashboards, without a histogram's suffixes.
ALL = """
vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason vllm:engine_sleep_state
vllm:kv_cache_usage_perc vllm:corrupted_requests_total vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:external_prefix_cache_queries_total vllm:external_prefix_cache_hits_total vllm:mm_cache_queries_total
vllm:mm_cache_hits_total vllm:num_preemptions_total vllm:prompt_tokens_total vllm:prompt_tokens_by_source_total
vllm:prompt_tokens_cached_total vllm:prompt_tokens_cached_by_source_total vllm:prompt_tokens_recomputed_total
vllm:generation_tokens_total vllm:request_success_total vllm:request_prompt_tokens vllm:request_generation_tokens
vllm:iteration_tokens_total vllm:request_max_num_generation_tokens vllm:request_params_n
vllm:request_params_max_tokens vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds
vllm:request_time_per_output_token_seconds vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds
vllm:request_inference_time_seconds vllm:request_prefill_time_seconds vllm:request_decode_time_seconds
vllm:request_prefill_kv_computed_tokens vllm:kv_block_lifetime_seconds vllm:kv_block_idle_before_evict_seconds
vllm:kv_block_reuse_gap_seconds vllm:lora_requests_info vllm:cache_config_info vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:sleep_mode_operation_duration_seconds
vllm:rl_weight_update_operation_duration_seconds vllm:estimated_flops_per_gpu_total
vllm:estimated_read_bytes_per_gpu_total vllm:estimated_write_bytes_per_gpu_total vllm:num_requests_kv_fetch_by_stage
vllm:nixl_xfer_time_seconds vllm:nixl_bytes_transferred vllm:nixl_num_failed_transfers_total
vllm:kv_offload_total_bytes_total vllm:kv_offload_load_bytes_total vllm:kv_offload_store_time_total
vllm:kv_offload_cpu_cache_usage_perc vllm:simple_kv_offload_used_blocks http_requests_total
http_request_duration_seconds
"""

# Upper bounds of histograms in loggers.py, as `le` has them; token counts go on to the longest sequence.
LATENCIES = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
GAPS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
COUNTS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 5000.0 10000.0 20000.0 50000.0 100000.0"
BOUNDS = {
    "vllm:time_to_first_token_seconds":
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0",
    "vllm:inter_token_latency_seconds": GAPS,
    "vllm:request_time_per_output_token_seconds": GAPS,
    "vllm:e2e_request_latency_seconds": LATENCIES,
    "vllm:request_queue_time_seconds": LATENCIES,
    "vllm:request_inference_time_seconds": LATENCIES,
    "vllm:request_prefill_time_seconds": LATENCIES,
    "vllm:request_decode_time_seconds": LATENCIES,
    "vllm:iteration_tokens_total":
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "vllm:request_prompt_tokens": COUNTS,
    "vllm:request_generation_tokens": COUNTS,
    "vllm:request_max_num_generation_tokens": COUNTS,
    "vllm:request_params_max_tokens": COUNTS,
    "vllm:request_prefill_kv_computed_tokens": COUNTS,
}

"""vLLM's names without an implementation here: which are accepted, which are refused, and what to do then.

A *neutral* name is accepted with the values that change nothing; any other value is refused by name.  A *refused* name
has no such value but None.

    SAMPLING     sampling parameters: of requests, and of the offline API
    RULES        engine arguments: the offline API takes all of them, the command line has some of them as flags
    CALL         arguments of calls of the offline API; METHODS: its methods
    FLAGS        flags of `vllm serve`, so that a command written for vLLM starts: the log says what each means here

A text of RULES names options in braces, which the command line and the offline API write in their own ways.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

ANY: tuple[Any, ...] = (...,)  # no value changes anything

SAMPLING: dict[str, tuple[Any, ...]] = {  # sampling parameters, with their values that change nothing beside None
    "use_beam_search": (False,), "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,), "routed_experts_prompt_start": (0,),
    "logits_processors": ([],), "watermarking": (False,),
}


def is_neutral(value: object, accepted: Collection[Any]) -> bool:
    """Whether `value` is None or one of `accepted`: a number never equals true or false."""
    return value is None or accepted is ANY or any(
        isinstance(value, bool) == isinstance(one, bool) and isinstance(value, type(one) | int | float)
        and value == one for one in accepted)


def ignored_key(given: Mapping[str, Any], obeyed: Collection[str], neutral: Mapping[str, Collection[Any]]) -> str:
    """Returns a key of a free-form value that would be ignored though it has a meaning, "" if there is none.

    Args:
        obeyed: the keys that are read.
        neutral: further keys, with the values that change nothing beside None.
    """
    return next((key for key, value in given.items()
                 if key not in obeyed and not is_neutral(value, neutral.get(key, ()))), "")


OFF: tuple[Any, ...] = (False,)
ONE: tuple[Any, ...] = (1,)
_OPTION = re.compile(r"\{(\w+)\}")


class Same(Enum):
    """Stands for the value of another argument."""

    MODEL = "model"


SAME = Same.MODEL


class Rule(NamedTuple):
    """What holds whatever the value of an argument is, the values that change nothing, and what to do for another."""

    accepted: tuple[Any, ...]
    meaning: str
    instead: str

    def told(self, write: Callable[[str], str]) -> tuple[str, str]:
        """Returns both texts; `write` writes an option's name."""
        meaning, instead = (_OPTION.sub(lambda found: write(found[1]), text) for text in self[1:])
        return meaning, instead or meaning


def _rules(meaning: str, neutral: Mapping[str, tuple[Any, ...]] = {}, *, free: str = "", refused: str = "",
           instead: str = "") -> Iterator[tuple[str, Rule]]:
    """Args: free: names of which every value is accepted; refused: those of which only None is."""
    accepted = dict.fromkeys(free.split(), ANY) | dict.fromkeys(refused.split(), ()) | dict(neutral)
    return ((name, Rule(values, meaning, instead)) for name, values in accepted.items())


RULES: dict[str, Rule] = dict((
    *_rules("a model's ranks are processes of one machine", {
        "prefill_context_parallel_size": ONE, "decode_context_parallel_size": ONE, "nnodes": ONE, "node_rank": (0,),
        "enable_hc_sp": OFF, "enable_batch_sharded_sampling": OFF, "enable_dbo": OFF, "numa_bind": OFF,
        "worker_use_ray": OFF},
        refused="device_ids numa_bind_nodes numa_bind_cpus",
        instead="a model's ranks are processes of one machine, as many as {tensor_parallel_size} and "
        "{pipeline_parallel_size} say: leave it out"),
    *_rules("an engine has one copy of its model", {
        "data_parallel_size": ONE, "data_parallel_rank": (0,), "data_parallel_start_rank": (0,),
        "data_parallel_size_local": (0, 1), "data_parallel_hybrid_lb": OFF, "data_parallel_external_lb": OFF,
        "data_parallel_multi_port_external_lb": OFF}, instead="an engine has one copy of its model: start "
        "several servers behind one address with slotwise scale"),
    *_rules("how ranks reach each other follows from their device", free="disable_custom_all_reduce "
            "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
            "cp_kv_cache_interleave_size master_addr master_port all2all_backend "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_address data_parallel_rpc_port "
            "data_parallel_backend dp_sync_interval disable_nccl_for_dp_synchronization enable_nccl_comm_suspend "
            "ray_workers_use_nsight enable_shm_tensor_arena ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold"),
    *_rules("each rank is a process that the engine starts", {
        "distributed_executor_backend": ("mp", "uni"), "worker_cls": ("auto",), "worker_extension_cls": ("",)},
        instead="each rank is a process that the engine starts: leave it out; on Ray Serve each replica is a server"),
    *_rules("experts stay on the ranks that read them", {
        "enable_eplb": OFF, "enable_elastic_ep": OFF, "enable_ep_weight_filter": OFF,
        "enable_return_routed_experts": OFF}, free="moe_backend eplb_config elastic_ep_max_dp_size eplb_window_size "
        "expert_placement_strategy num_redundant_experts eplb_step_interval eplb_log_balancedness",
        instead="experts stay on the ranks that read them: leave it out"),
    *_rules("a step has one way to run; on a GPU, decode steps are captured", free="enforce_eager "
            "cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes"),
    *_rules("on a GPU, decode steps are captured at any length", free="max_seq_len_to_capture"),
    *_rules("kernels are compiled when they are first needed", free="compilation_config optimization_level "
            "jit_monitor_mode jit_monitor_verbose"),
    *_rules("each device has its own kernels", free="ir_op_priority linear_backend sparse_indexer_topk_backend "
            "attention_backend attention_config kernel_config enable_flashinfer_autotune disable_cascade_attn "
            "gdn_prefill_backend kda_prefill_backend kda_decode_backend performance_mode use_fp64_gumbel "
            "logits_processor_pattern"),
    *_rules("recurrent states are kept in float32, in the blocks of the cache", {
        "mamba_cache_dtype": ("auto", "float32"), "mamba_ssm_cache_dtype": ("auto", "float32")},
            free="mamba_config mamba_backend mamba_block_size mamba_cache_mode prefix_match_unit "
            "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_ssu_algorithm "
            "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds engram_config"),
    *_rules("on a GPU a step is planned while another runs, on a CPU none is", free="async_scheduling "
            "disable_async_output_proc"),
    *_rules("prompts are chunked unless {prefill} says otherwise", {"enable_chunked_prefill": (True,)}, instead="use "
            "{prefill} inline (prompts run whole beside rows that decode) or {prefill} alone"),
    *_rules("{batching}, {scheduling_policy} and {max_num_seqs} form the batch", {
        "long_prefill_token_threshold_adaptive": OFF, "prefill_schedule_interval": ONE, "watermark": (0.0,),
        "num_scheduler_steps": ONE, "max_num_partial_prefills": ONE, "max_long_partial_prefills": ONE,
        "scheduler_delay_factor": (0.0,), "preemption_mode": ("recompute",)},
        free="scheduler_reserve_full_isl use_v2_block_manager multi_step_stream_outputs",
        refused="max_num_scheduled_tokens max_num_active_seqs max_num_queued_reqs max_num_queued_tokens scheduler_cls",
        instead="{batching}, {scheduling_policy}, {max_num_seqs} and {max_num_batched_tokens} form the batch"),
    *_rules("{kv_cache_memory} or {gpu_memory_utilization} sizes the cache", {
        "kv_cache_dtype_skip_layers": ([],), "kv_sharing_fast_prefill": OFF, "calculate_kv_scales": OFF,
        "prefix_cache_retention_interval": (0,), "disable_sliding_window": OFF},
        free="prefix_caching_hash_algo disable_hybrid_kv_cache_manager swa_bounded_replay",
        refused="num_gpu_blocks_override quantization_param_path"),
    *_rules("a preempted request is computed again, never swapped; on a GPU {kv_offloading_size} keeps evicted blocks "
            "in host memory", {"kv_offloading_backend": ("native",)}, free="swap_space"),
    *_rules("weights stay on the device", {
        "cpu_offload_gb": (0, 0.0), "offload_group_size": (0,), "cpu_offload_params": (set(), [], {}),
        "offload_params": (set(), [], {})}, free="offload_backend offload_num_in_group offload_prefetch_step "
        "enable_cumem_allocator", instead="weights stay on the device: {quantization} makes them smaller"),
    *_rules("a model can always sleep", {"sleep_preserve_parameter_names": ([],)},
            free="enable_sleep_mode sleep_mode_offload_cudagraph",
            instead="a model sleeps as a whole: leave it out"),
    *_rules("weights are read from safetensors and GGUF", {
        "load_format": ("auto", "safetensors", "gguf"), "model_weights": ("", SAME), "model_loader_extra_config": ({},),
        "ignore_patterns": ("original/**/*", ["original/**/*"])},
        free="safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "pt_load_map_location max_parallel_loading_workers",
        instead="weights are read from safetensors and GGUF: convert the checkpoint"),
    *_rules("the checkpoint's own tokenizer is used", {
        "tokenizer_mode": ("auto", "hf"), "tokenizer": (SAME,), "skip_tokenizer_init": OFF, "tokens_only": OFF,
        "tokenizer_revision": ("main",), "tokenizer_pool_size": (0,)}, free="tokenizer_pool_type "
        "tokenizer_pool_extra_config", instead="the checkpoint's own tokenizer is used: put another "
        "tokenizer.json into its folder"),
    *_rules("a checkpoint's config.json is obeyed", {
        "hf_overrides": ({},), "model_class_overrides": ({},), "hf_config_path": (SAME,), "config_format": ("auto",
        "hf"), "rope_scaling": ({},), "model_impl": ("auto", "vllm"),
        "override_attention_dtype": ("auto",)}, refused="rope_theta quantization_config diffusion_config",
        instead="a checkpoint's config.json is obeyed: edit it in a copy of the folder"),
    *_rules("no code of a checkpoint is ever run; supported families are built in", free="trust_remote_code "
            "code_revision allow_deprecated_quantization"),
    *_rules("the newest revision of a hub model is downloaded", {"revision": ("main",)}, instead="the newest revision "
            "of a hub model is downloaded: give the folder of another"),
    *_rules("the hub's own cache and login are used", {"hf_token": (True,)}, refused="download_dir",
            instead="set the environment variable HF_HOME (the hub's cache) or HF_TOKEN (its login)"),
    *_rules("a model does what its checkpoint was made for", {
        "runner": ("auto", "generate", "pooling"),
        "task": ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
        "convert": ("auto", "none", "embed", "classify"), "enable_prompt_embeds": OFF},
        refused="override_pooler_config",
        instead="a checkpoint says whether it generates, embeds or classifies, and pooler_config how it pools"),
    *_rules("a model takes text only", free="allowed_local_media_path allowed_media_domains language_model_only "
            "limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs "
            "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
            "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype renderer_num_workers "
            "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
            "skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
            "mm_ipc_gpu_memory_gb mm_device_do_normalize disable_chunked_mm_input disable_mm_preprocessor_cache "
            "enable_mm_processor_stats enable_multimodal_encoder_data_parallel ec_manager_config",
            refused="io_processor_plugin ec_transfer_config"),
    *_rules("adapters are LoRA's, of products, in the model's own type", {
        "enable_prompt_adapter": OFF, "default_mm_loras": ({},), "lora_dtype": ("auto",)},
            free="fully_sharded_loras enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras max_lora_cls_labels enable_lora_bias lora_extra_vocab_size max_prompt_adapters "
            "max_prompt_adapter_token",
            refused="qlora_adapter_name_or_path lora_target_modules long_lora_scaling_factors",
            instead="adapters are those of lora_request, and their files say what they change: leave it out"),
    *_rules("grammars have one compiler, llguidance", {
        "structured_outputs_config": ({},), "guided_decoding_disable_any_whitespace": OFF,
        "guided_decoding_disable_additional_properties": OFF},
        free="guided_decoding_backend guided_decoding_disable_fallback", instead="it is a field of a request: "
        "whitespace_pattern or disable_any_whitespace of structured_outputs, or a schema's additionalProperties"),
    *_rules("outputs are returned as they are; slotwise serve tells reasoning from answers", {
        "reasoning_parser": ("",), "reasoning_parser_plugin": ("",),
        "logits_processors": ([],), "aux_output_config": ({},)}, refused="reasoning_config",
        instead="outputs are returned as they are, and slotwise serve tells reasoning from answers: leave it out"),
    *_rules("{speculative_config} says where drafts come from, and names a draft model", {"num_lookahead_slots": (0,)},
            free="speculative_disable_mqa_scorer disable_logprobs_during_spec_decoding spec_decoding_acceptance_method "
            "typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha "
            "per_request_spec_decode_metrics",
            refused="spec_method spec_model spec_tokens speculative_model num_speculative_tokens "
            "speculative_model_quantization speculative_draft_tensor_parallel_size speculative_max_model_len "
            "speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min",
            instead="drafts come from texts or a draft model, as {speculative_config} says: name it there"),
    *_rules("a token has at most 20 log-probabilities, and its own", {
        "max_logprobs": (20,), "logprobs_mode": ("raw_logprobs",), "return_sampling_mask": OFF,
        "enable_trace_replay": OFF}, instead="a token has at most 20 log-probabilities, and its own: leave it out"),
    *_rules("outputs have no watermark", refused="watermark_config"),
    *_rules("requests are not logged; {event_log} records them", {
        "enable_log_requests": OFF, "disable_log_requests": (True,), "enable_logging_iteration_details": OFF},
        refused="logging_config log_level log_config_file", instead="requests are not logged; {event_log} records "
        "them, and Python's logging has the rest"),
    *_rules("metrics have vLLM's names, with `slotwise:` in the place of `vllm:`", {
        "kv_cache_metrics": OFF, "cudagraph_metrics": OFF, "enable_layerwise_nvtx_tracing": OFF,
        "enable_mfu_metrics": OFF, "profiler_config": ({},)}, free="kv_cache_metrics_sample aggregate_engine_logging "
        "show_hidden_metrics_for_version",
        refused="custom_histogram_buckets otlp_traces_endpoint collect_detailed_traces",
        instead="metrics are those of docs/observability.md; traces are those of slotwise serve"),
    *_rules("an engine outside of slotwise serve works alone", {
        "enable_fault_tolerance": OFF, "fault_tolerance_config": ({},), "override_neuron_config": ({},),
        "additional_config": ({},), "shutdown_timeout": (0,)}, free="fail_on_environ_validation",
        refused="kv_transfer_config kv_events_config weight_transfer_config",
        instead="an engine outside of slotwise serve works alone, with the weights it has loaded: leave it out"),
))


CALL: dict[str, tuple[Any, ...]] = {  # arguments of a call, with their values that change nothing
    "lora_request": ([], [None]), "tokenization_kwargs": ({},), "mm_processor_kwargs": ({},),
    "chat_template_content_format": ("auto", "string"), "prompt_adapter_request": (), "guided_options_request": (),
    "reset_connector": (False,), "trace_headers": ({},), "data_parallel_rank": (0,), "session_id": (), "kv_hints": (),
    "reasoning_ended": (), "reasoning_parser_kwargs": ({},), "tags": ([],),
}
METHODS = {  # of vLLM's `LLM`, and what to do instead
    "beam_search": "set n, and choose among the outputs by cumulative_logprob",
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "generate() runs a list of prompts together"),
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model is not exposed"),
    **dict.fromkeys(("start_profile", "stop_profile"), "start with event_log=FILE, and run `slotwise timeline FILE`"),
}

YES, NO = "true", "false"
NONE = ("null",)  # of a flag whose every value describes another server


class Flag(NamedTuple):
    """A flag of vLLM's."""

    names: tuple[str, ...]
    fits: tuple[str, ...]  # values that are accepted; (): all
    meaning: str  # what holds here, whatever the value
    instead: str = ""  # what to do for another value; "": the meaning says it
    is_switch: bool = False  # --name and --no-name, without a value

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


def _switch(name: str, meaning: str, fits: tuple[str, ...] = (), instead: str = "") -> Flag:
    return Flag((name,), fits, meaning, instead, is_switch=True)


def option(setting: str) -> str:
    """Returns the option of a setting."""
    return "--" + setting.replace("_", "-")


def _shared(*arguments: str, short: str = "", is_switch: bool = False) -> Flag:
    """A flag that the offline API has as an argument, or as several of one meaning."""
    rule = RULES[arguments[0]]
    fits = () if rule.accepted is ANY else tuple([
        {True: YES, False: NO}[one] if isinstance(one, bool) else str(one) for one in rule.accepted]) or NONE
    names = (*map(option, arguments), *short.split())
    return Flag(names, fits, *rule.told(option), is_switch=is_switch)


FLAGS: tuple[Flag, ...] = (
    _shared("data_parallel_size", short="-dp"),
    Flag(("--api-server-count",), ("1",), "one process serves HTTP",
         "one process serves HTTP: start further servers with slotwise scale"),
    _shared("distributed_executor_backend"),
    _shared("disable_custom_all_reduce", is_switch=True),
    _switch("--disable-frontend-multiprocessing", "the engine always has a process of its own"),
    _shared("trust_remote_code", is_switch=True),
    _shared("enforce_eager", is_switch=True),
    _shared("compilation_config", short="-O"),
    _shared("max_seq_len_to_capture"),
    _shared("async_scheduling", is_switch=True),
    _shared("enable_chunked_prefill", is_switch=True),
    _shared("swap_space"),
    _shared("cpu_offload_gb"),
    _shared("enable_sleep_mode", is_switch=True),
    _shared("load_format"),
    _shared("tokenizer_mode"),
    _shared("runner", "task"),
    _switch("--disable-log-requests", "requests are logged with --enable-log-requests only", (YES,),
            "requests are logged with --enable-log-requests"),
    _switch("--disable-uvicorn-access-log", "HTTP exchanges are logged with --access-log only", (YES,),
            "HTTP exchanges are logged with --access-log"),
    Flag(("--uvicorn-log-level",), (), "the web server logs nothing of its own; --log-format is the form of the log"),
    _switch("--enable-server-load-tracking", "GET /load is always answered", (YES,)),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details", (YES,)),
    _switch("--enable-request-id-headers", "every response has X-Request-Id", (YES,)),
)


def notices(asked: argparse.Namespace) -> list[str]:
    """Returns a line for each flag that was given.  Raises ValueError for a value that describes another server."""
    lines = []
    for flag in FLAGS:
        value = getattr(asked, flag.dest)
        if value is None:
            continue
        text = {True: YES, False: NO}.get(value, value)
        if flag.fits and text not in flag.fits:
            shown = {True: flag.names[0], False: f"--no-{flag.dest.replace('_', '-')}"}.get(
                value, f"{flag.names[0]} {text}")
            raise ValueError(f"{shown}: {flag.instead or flag.meaning}")
        lines.append(f"{flag.names[0]} has no effect: {flag.meaning}")
    return lines

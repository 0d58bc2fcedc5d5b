"""Small random checkpoints of every family served, and what transformers makes of them.

Weights are drawn wide, biases and norms away from the zeros and ones they start at: the output then depends visibly on
every tensor, and greedy decoding does not fall into a loop after a few tokens.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SIZES = {
    "vocab_size": 1024, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

HYBRID = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
           "shared_expert_intermediate_size": 96}

GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
           "logits_scaling": 0.5}
GROUPED = EXPERTS | {"num_experts": ..., "shared_expert_intermediate_size": ..., "n_routed_experts": 8, "n_group": 4,
                     "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5}

STATEFUL = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                          "max_position_embeddings", "rms_norm_eps"), ...)  # fields that models without attention lack
MAMBA = {"num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 6,
         "mamba_expand": 1}

LATENT = {  # sizes that are no multiples of a vector
    "head_dim": ..., "num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20, "v_head_dim": 12}  # fmt: skip

INDEXED = {"index_head_dim": 16, "index_n_heads": 2}
ROUTED = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
          "moe_intermediate_size": 64, "n_shared_experts": 2}

# The class of transformers, without "ForCausalLM" where it ends so, and where its config differs from SIZES.
CLASSIC = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps"), ...)  # that older configs lack
UNTIED = {"tie_word_embeddings": False}
GPT = CLASSIC | dict.fromkeys(("intermediate_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                               "max_position_embeddings"), ...) | {
    "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 2048, "n_inner": 160, "initializer_range": 0.2}
OPT = CLASSIC | {"intermediate_size": ..., "initializer_range": ..., "ffn_dim": 160, "init_std": 0.2}
DECODER = CLASSIC | {"is_decoder": True, "initializer_range": 0.5}
ROBERTA = DECODER | {"pad_token_id": 1, "max_position_embeddings": 2050}
XGLM = OPT | UNTIED | {"hidden_size": ..., "num_hidden_layers": ..., "num_attention_heads": ..., "d_model": 96,
                       "num_layers": 3, "attention_heads": 4, "init_std": 0.5}

SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads")
UNKNOWN = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps")

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}}),
    "mistral": ("Mistral", {"sliding_window": 48}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 64,
                        "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"num_hidden_layers": 4, "sliding_window": 48, "query_pre_attn_scalar": 40,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                          "tie_word_embeddings": False}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 4, "sliding_window": 48, "query_pre_attn_scalar": 40,
                          "sliding_window_pattern": 2,
                          "tie_word_embeddings": False, "rope_parameters": {
                              "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                              "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}}}),
    "phi3": ("Phi3", {"head_dim": 24, "sliding_window": 48, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                            "logits_scaling": 0.5}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True,
                            "sliding_window": 48}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 48, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
                           "original_max_position_embeddings": 512}}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                               "shared_expert_intermediate_size": 96, "mlp_only_layers": [1],
                               "use_sliding_window": True, "sliding_window": 48, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                               "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"head_dim": ..., "num_experts": 6, "num_experts_per_tok": 2}),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 12.0,
                                   "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 0.5}),
    "gpt_oss": ("GptOss", {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "sliding_window": 48, "rope_parameters": {
                               "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "truncate": False,
                               "original_max_position_embeddings": 512}}),
    "qwen3_next": ("Qwen3Next", HYBRID | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", HYBRID | {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": ("Qwen3_5Moe", HYBRID | EXPERTS | {"intermediate_size": ..., "attention_bias": True}),
    "zamba2": ("Zamba2", {
        "num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["hybrid"],
        "num_mem_blocks": 2, "adapter_rank": 8, "use_shared_attention_adapter": True, "use_mem_rope": True,
        "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 6, "mamba_expand": 1, "num_key_value_heads": 4,
        "head_dim": ..., "initializer_range": 0.1}),
    "jetmoe": ("JetMoe", {
        "num_attention_heads": ..., "head_dim": ..., "kv_channels": 24, "num_local_experts": 6,
        "num_experts_per_tok": 2}),
    "zamba": ("Zamba", {
        "num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["hybrid"],
        "n_mamba_heads": 2, "mamba_d_state": 6, "mamba_expand": 1, "head_dim": ..., "initializer_range": 0.1}),
    "lfm3": ("Lfm3", {
        "num_hidden_layers": 4, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 48, "tie_word_embeddings": False, "rms_norm_eps": ..., "norm_eps": 1e-5}),
    "olmo_hybrid": ("OlmoHybrid", HYBRID | {
        "head_dim": ..., "linear_conv_kernel_dim": 3, "linear_num_key_heads": 4, "linear_key_head_dim": 12}),
    "diffllama": ("DiffLlama", {"head_dim": 24, "lambda_std_dev": 0.5, "attention_bias": True}),
    "doge": ("Doge", {"head_dim": 24, "attention_bias": True}),
    "laguna": ("Laguna", EXPERTS | {
        "num_hidden_layers": 4, "sliding_window": 48, "moe_routed_scaling_factor": 1.5,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads_per_layer": [4, 6, 4, 6]}),
    "kimi_linear": ("KimiLinear", LATENT | ROUTED | {
        "q_lora_rank": None, "n_routed_experts": ..., "first_k_dense_replace": ..., "num_local_experts": 8,
        "linear_head_dim": 6, "linear_num_heads": 2, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "glm4_moe": ("Glm4Moe", GROUPED | {"use_qk_norm": True}),
    "dots1": ("Dots1", GROUPED | {"first_k_dense_replace": 1, "sliding_window": 48, "max_window_layers": 1,
                                  "norm_topk_prob": True}),
    "solar_open": ("SolarOpen", GROUPED | {"intermediate_size": ...}),
    "minimax": ("MiniMax", {
        "num_hidden_layers": 4, "num_local_experts": 6, "head_dim": 8, "block_size": 16,
        "linear_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.9}),
    "mimo_v2": ("MiMoV2Flash", GROUPED | {
        "num_hidden_layers": 4, "n_shared_experts": ..., "v_head_dim": 20, "sliding_window": 48, "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention", "full_attention"]}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PARTIAL_ROPE}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 64, "use_bias": True}),
    "granite_moe_shared": ("GraniteMoeShared", GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 64}),
    "granite_swa": ("GraniteSWA", GRANITE | {"sliding_window": 48, "layer_rope_theta": [10_000.0, 0, 5e5],
                                            "tie_word_embeddings": False}),
    "granite_moe_swa": ("GraniteMoeSWA", GRANITE | {
        "num_local_experts": 4, "shared_intermediate_size": 64, "sliding_window": 48}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "mellum": ("Mellum", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "sliding_window": 48,
                          "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                          "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "hy_v3": ("HYV3", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
                       "num_shared_experts": 2}),
    "kolibri1": ("Kolibri1", EXPERTS | {"intermediate_size": ..., "sliding_window": 48, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    "aria": ("AriaText", {"moe_num_experts": 4, "moe_topk": 2}),
    "flint": ("Flint", EXPERTS | {"num_hidden_layers": 4, "sliding_window": 48, "mlp_only_layers": [0]}),
    "llama4": ("Llama4", {
        "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 192,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 40, "floor_scale": 16,
        "attn_scale": 0.5}),
    "hunyuan_moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 3}),
    "phimoe": ("Phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.3, "attention_bias": True,
                          "lm_head_bias": True}),
    "afmoe": ("Afmoe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "sliding_window": 48,
                        "global_attn_every_n_layers": 2, "mup_enabled": True, "route_scale": 1.5}),
    "exaone_moe": ("ExaoneMoe", GROUPED | {
        "n_routed_experts": ..., "n_shared_experts": ..., "num_experts": 8, "num_shared_experts": 2,
        "sliding_window": 48, "sliding_window_pattern": 2}),
    "ministral": ("Ministral", {"sliding_window": 48}),
    "glm": ("Glm", {"rope_parameters": PARTIAL_ROPE}),
    "glm4": ("Glm4", {"rope_parameters": PARTIAL_ROPE}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "helium": ("Helium", {"head_dim": 24}),
    "seed_oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
                      "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", STATEFUL | {"head_dim": 24, "num_heads": 8, "n_groups": 2, "state_size": 12}),
    "nemotron_h": ("NemotronH", {
        "num_hidden_layers": ..., "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention",
                                                        "linear_attention", "mlp", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 6, "head_dim": 24,
        "time_step_min": 1e-9}),
    "nemotron_h_moe": ("NemotronH", {
        "num_hidden_layers": ..., "layers_block_type": [
            "linear_attention", "moe", "full_attention", "linear_attention", "moe", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 6, "head_dim": 24,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 40, "routed_scaling_factor": 1.5}),
    "falcon_h1": ("FalconH1", MAMBA | {
        "num_hidden_layers": 3, "mamba_d_ssm": 96, "mamba_rms_norm": True, "head_dim": ..., "key_multiplier": 0.4,
        "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 0.6],
        "attention_out_multiplier": 1.3, "attention_in_multiplier": 0.9, "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7}),
    "mamba": ("Mamba", STATEFUL | {"expand": 1, "state_size": 6}),
    "falcon_mamba": ("FalconMamba", STATEFUL | {"expand": 1, "tie_word_embeddings": False}),
    "jamba": ("Jamba", {"num_hidden_layers": 4, "mamba_d_state": 5, "mamba_expand": 1, "attn_layer_period": 3,
                        "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": ...}),
    "lfm2_moe": ("Lfm2Moe", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
                             "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 64, "routed_scaling_factor": 1.5}),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1], "head_dim": ...}),
    "granite_hybrid": ("GraniteMoeHybrid", MAMBA | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "head_dim": ...,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "logits_scaling": 0.5}),
    "exaone4": ("Exaone4", {"sliding_window": 48, "sliding_window_pattern": 2, "initializer_range": 0.4}),
    "deepseek_v2": ("DeepseekV2", LATENT | ROUTED | {
        "q_lora_rank": None, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("DeepseekV3", LATENT | ROUTED | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "mscale": 0.707, "mscale_all_dim": 1.0}}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | ROUTED | {
        "first_k_dense_replace": ..., "attention_bias": True, "initializer_range": 0.3,
        "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "axk1": ("AXK1", LATENT | ROUTED | {
        "mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": ...}),
    "deepseek_v32": ("DeepseekV32", LATENT | ROUTED | INDEXED),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | ROUTED | INDEXED | {"indexer_types": ["full", "shared", "full"]}),
    "youtu": ("Youtu", LATENT | {"rope_interleave": False}),
    "minicpm3": ("MiniCPM3", LATENT | {"dim_model_base": 48, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {**dict.fromkeys(UNKNOWN + SHAPE[1:], ...), "n_layer": 2, "n_head": 6,
                        "initializer_range": 0.3, "apply_residual_connection_post_layernorm": True}),
    "mpt": ("Mpt", {**dict.fromkeys(UNKNOWN + SHAPE, ...), "d_model": 96, "n_layers": 3, "n_heads": 6,
                    "attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.2}}),
    "falcon": ("Falcon", {"num_hidden_layers": 2, **dict.fromkeys(UNKNOWN, ...)}),
    "falcon_new": ("Falcon", {"num_hidden_layers": 2, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True,
                              "ffn_hidden_size": 200, **dict.fromkeys(UNKNOWN, ...)}),
    "falcon_rw": ("Falcon", {"num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True, "multi_query": False,
                             "parallel_attn": False, "bias": True, "initializer_range": 0.3,
                             **dict.fromkeys(UNKNOWN, ...)}),
    "cohere": ("Cohere", {"num_hidden_layers": 2, "use_qk_norm": True, "logit_scale": 0.5, "head_dim": ...,
                          "initializer_range": 0.4, "rms_norm_eps": ...}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 48, "layer_types": [
        "sliding_attention", "full_attention"] * 2, "head_dim": ..., "rms_norm_eps": ..., "logit_scale": 0.5}),
    "apertus": ("Apertus", {"num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE}),
    "apertus1p5": ("Apertus1p5Text", {"num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE}),
    "cohere_compass": ("CohereCompass", {
        "num_hidden_layers": 4, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": ..., "rms_norm_eps": ..., "logit_scale": 0.5, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 4, 4]},
            "full_attention": None}}),
    "cohere2_moe": ("Cohere2Moe", {
        "num_hidden_layers": 4, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "prefix_dense_intermediate_size": 192,
        "rms_norm_eps": ..., "logit_scale": 0.5, "num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2}),
    "dbrx": ("Dbrx", {
        **dict.fromkeys(UNKNOWN + SHAPE, ...), "d_model": 96, "n_layers": 3, "n_heads": 4, "max_seq_len": 2048,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10_000.0}, "ffn_config": {
            "ffn_hidden_size": 64, "moe_num_experts": 6, "moe_top_k": 3}}),
    "arcee": ("Arcee", {"num_hidden_layers": 2, "mlp_bias": True}),
    "jais2": ("Jais2", {"num_hidden_layers": 2, "rms_norm_eps": ...}),
    "nanochat": ("NanoChat", {"num_hidden_layers": 2, "head_dim": ...}),
    "bitnet": ("BitNet", {"num_hidden_layers": 2, "head_dim": ...}),
    "hyperclovax": ("HyperCLOVAX", {"num_hidden_layers": 2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                                    "attention_multiplier": 0.1, "logits_scaling": 0.7}),
    "gemma4_unified": ("Gemma4Unified", {"num_hidden_layers": 2, "sliding_window": 48, "global_head_dim": 48,
                                         "layer_types": ["sliding_attention", "full_attention"],
                                         "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"num_hidden_layers": 2}),
    "gemma3n": ("Gemma3n", {"num_hidden_layers": 6, "sliding_window": 48, "intermediate_size": [160, 192] * 3,
                            "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
                            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1000, "laurel_rank": 8,
                            "altup_num_inputs": 3, "altup_active_idx": 1, "head_dim": 24,
                            "activation_sparsity_pattern": [0.5, 0.0, 0.8, 0.0, 0.0, 0.5],
                            "tie_word_embeddings": False}),
    "gemma4": ("Gemma4", {
        "num_hidden_layers": 6, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024,
        "use_double_wide_mlp": True, "global_head_dim": 48, "tie_word_embeddings": False}),
    "gemma4_moe": ("Gemma4", {
        "num_hidden_layers": 4, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0, "global_head_dim": 48, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 64, "tie_word_embeddings": False, "initializer_range": 0.3}),
    "vaultgemma": ("VaultGemma", {"num_hidden_layers": 4, "sliding_window": 48, "query_pre_attn_scalar": 40,
                                  "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0,
                                  "tie_word_embeddings": False}),
    "cwm": ("Cwm", {"num_hidden_layers": 4, "sliding_window": 48, "rope_parameters": LLAMA3_ROPE}),
    "ministral3": ("Ministral3", {"num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.5}}),
    "hunyuan": ("HunYuanDenseV1", {"num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 20.0}}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCode", GPT | {"initializer_range": 0.4}),
    "gpt_neox": ("GPTNeoX", CLASSIC),
    "opt": ("OPT", OPT),
    "gpt_neox_japanese": ("GPTNeoXJapanese", CLASSIC | {"intermediate_size": ..., "intermediate_multiple_size": 2}),
    "gpt_neo": ("GPTNeo", CLASSIC | {
        "attention_types": [[["global", "local"], 2]], "num_hidden_layers": ..., "num_layers": 4, "window_size": 48,
        "num_attention_heads": ..., "num_heads": 4}),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 12}),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 12}),
    "phi": ("Phi", CLASSIC | {"initializer_range": 0.3, "num_key_value_heads": 2, "qk_layernorm": True,
                              "num_hidden_layers": 2, "intermediate_size": 384}),
    "stablelm": ("StableLm", CLASSIC | {"num_key_value_heads": 2}),
    "stablelm_12b": ("StableLm", CLASSIC | {"num_key_value_heads": 2, "qk_layernorm": True, "use_qkv_bias": True,
                                            "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", UNTIED | {"rms_norm_eps": ..., "head_dim": ..., "sliding_window": 48}),
    "persimmon": ("Persimmon", CLASSIC | {"initializer_range": 0.3, "qk_layernorm": False}),
    "nemotron": ("Nemotron", {"rms_norm_eps": ...}),
    "olmo": ("Olmo", {"rms_norm_eps": ..., "head_dim": ..., "clip_qkv": 2.0}),
    "xglm": ("XGLM", XGLM),
    "biogpt": ("BioGpt", CLASSIC | UNTIED | {"initializer_range": 0.3}),
    "ctrl": ("CTRLLMHeadModel", GPT | UNTIED | {"n_inner": ..., "dff": 160}),
    "openai_gpt": ("OpenAIGPTLMHeadModel", GPT | {"n_inner": ..., "initializer_range": 0.5}),
    "bert_decoder": ("BertLMHeadModel", DECODER),
    "ernie": ("Ernie", DECODER),
    "bert_generation": ("BertGenerationDecoder", DECODER | {"initializer_range": 0.3}),
    "megatron_bert": ("MegatronBert", DECODER | {"initializer_range": 0.8}),
    "roberta_decoder": ("Roberta", ROBERTA),
    "xlm_roberta_decoder": ("XLMRoberta", ROBERTA),
    "camembert_decoder": ("Camembert", ROBERTA),
    "data2vec": ("Data2VecText", ROBERTA),
    "roberta_prelayernorm": ("RobertaPreLayerNorm", ROBERTA | {"num_hidden_layers": 2}),
    "xlm_roberta_xl": ("XLMRobertaXL", ROBERTA | {"initializer_range": 0.8}),
    "opt_350m": ("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 64,
                              "init_std": 0.5}),
}  # fmt: skip

RECURRENT = (  # families whose states no ranks divide
    "olmo_hybrid", "kimi_linear", "zamba", "zamba2", "lfm3", "minimax",
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "mamba2", "bamba", "granite_hybrid", "mamba",
    "falcon_mamba", "jamba", "lfm2_moe", "nemotron_h", "nemotron_h_moe", "falcon_h1")

ALIKE = {
    "mamba": "jamba", "falcon_mamba": "jamba", "lfm2_moe": "lfm2", "bamba": "granite_hybrid", "cwm": "mistral",
    "ministral": "mistral", "vaultgemma": "gemma2", "gemma": "gemma2", "jais2": "arcee", "mpt": "bloom",
    "falcon": "falcon_new", "gemma4_unified": "gemma4", "cohere": "cohere2", "hyperclovax": "granite",
    "glm4_moe_lite": "deepseek_v3", "deepseek_v32": "deepseek_v3", "glm_moe_dsa": "deepseek_v3", "axk1": "deepseek_v3",
    "youtu": "minicpm3", "seed_oss": "llama_bias", "helium": "ernie4_5", "glm": "glm4", "smollm2": "llama3",
    "qwen3_5_moe": "qwen3_next", "flex_olmo": "olmoe", "solar_open": "glm4_moe", "dots1": "glm4_moe",
    "exaone_moe": "glm4_moe", "hy_v3": "glm4_moe", "mellum": "qwen3_moe", "aria": "ernie4_5_moe",
    "granite_moe_shared": "ernie4_5_moe", "granite_moe_swa": "granite_swa", "flint": "granite_swa",
    "hunyuan_moe": "hunyuan", "gpt_bigcode": "gpt2", "gpt_neo": "gpt2", "starcoder2": "gpt2",
    "gpt_neox_japanese": "gpt_neox", "nemotron": "gpt_neox", "persimmon": "phi", "codegen": "gptj",
    "stablelm": "stablelm_12b", "olmo": "stablelm_12b", "opt": "opt_350m", "openai_gpt": "opt_350m",
    "xglm": "opt_350m", "biogpt": "opt_350m", "ctrl": "opt_350m", "ernie": "opt_350m",
    "bert_decoder": "opt_350m", "bert_generation": "opt_350m", "megatron_bert": "gpt2", "roberta_decoder": "opt_350m",
    "xlm_roberta_decoder": "opt_350m", "camembert_decoder": "opt_350m", "data2vec": "opt_350m",
    "roberta_prelayernorm": "gpt2", "xlm_roberta_xl": "gpt2",
    "cohere2_moe": "cohere2", "dbrx": "qwen3_moe", "olmo_hybrid": "qwen3_next", "laguna": "afmoe",
    "apertus1p5": "apertus", "cohere_compass": "cohere2", "lfm3": "lfm2",
    "zamba": "falcon_h1", "zamba2": "falcon_h1",
}  # fmt: skip
"""Families composed like another one, which `make test` compares in their place; `make families` compares all."""
EVERY = list(_SHAPES)
ARE_ALL_ASKED = bool(os.environ.get("SLOTWISE_ALL_FAMILIES"))  # by `make families`
# Encoders, of which transformers has no class with a head that generates: its class, and fields beside SIZES.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "eurobert": ("EuroBert", {"classifier_pooling": "mean"}),
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": ("Camembert", {"pad_token_id": 1}),
    "electra": ("Electra", {"embedding_size": 96}),
    "electra_small": ("Electra", {"embedding_size": 40}),
    "mpnet": ("MPNet", {"pad_token_id": 1, "head_dim": ...}),
    "albert": ("Albert", {"embedding_size": 40, "num_hidden_groups": 2, "num_hidden_layers": 4, "head_dim": ...}),
    "distilbert": ("DistilBert", {"hidden_size": ..., "num_hidden_layers": ..., "num_attention_heads": ..., "dim": 96,
                                  "hidden_dim": 160, "n_layers": 3, "n_heads": 4}),
    "nomic_bert": ("NomicBert", {"head_dim": 24}),
    "gte": ("Gte", {"type_vocab_size": 1, "head_dim": ...}),
    "modernbert": ("ModernBert", {"head_dim": ..., "num_hidden_layers": 4, "local_attention": 24, "norm_bias": True,
                                  "classifier_pooling": "mean", "sep_token_id": 2, "cls_token_id": 1}),
}
ENCODERS_ALIKE = {"xlm_roberta": "roberta", "camembert": "roberta", "electra": "bert", "distilbert": "bert",
                  "electra_small": "albert"}
COMPARED_ENCODERS = [name for name in ENCODERS if ARE_ALL_ASKED or name not in ENCODERS_ALIKE]

FAMILIES = EVERY if ARE_ALL_ASKED else [name for name in EVERY if name not in ALIKE]
DIFFERENT_CACHES = [
    "llama3", "mistral", "gemma2", "gpt_oss", "llama4", "qwen3_next", "kimi_linear", "lfm2", "mamba2", "nemotron_h_moe",
    "falcon_h1", "jamba", "granite_hybrid", "minimax", "deepseek_v3", "mimo_v2", "bloom", "gemma3n", "gemma4", "gpt2"]
"""Families that differ in what a request keeps (blocks of all layers, of windows or chunks, latents, states, keys that
layers share) and in how positions are encoded (rotation, table or bias)."""
NOT_IN_TORCH = ("softcapping", "gpt_oss", "mamba", "granite_swa", "granitemoe_swa", "mimo_v2", "flint", "bloom", "mpt",
                '"gpt_neo"', "gpt_neox_japanese", "xglm", "openai-gpt", "megatron-bert", '"mpnet"')
"""In configs of models whose attention torch's own does not compute."""
COUNTED = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl")
"""Types of models whose positions start at 0 in `generate`, and after the padding token's in `forward`."""
UNPADDED = ("llama4_text", "bert-generation")  # types of models whose tokens depend on padding
UNSCALED = ("Gemma3n", "Gemma4", "Gemma4Unified")
"""Classes whose scores are not divided by the root of the size of a head."""

PRODUCTS = "Wqkv.weight", "out_proj.weight"  # which DBRX has in a module called a norm

DOWN = tuple(f"{name}.weight" for name in ("mlp.c_proj", "dense_4h_to_h", "fc2", "fc_out", "ffn.2", "output.dense"))
"""The second product of an MLP without gates."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def own_fields(family: str) -> dict[str, Any]:
    """Where the config of a family of EVERY differs from SIZES."""
    return _SHAPES[family][1]


def class_name(family: str) -> str:
    """The class of transformers, as `architectures` in config.json has it."""
    name = _SHAPES[family][0]
    return name if name.endswith(("Model", "Decoder")) else f"{name}ForCausalLM"


def make(
    family: str, folder: Path, *, seed: int = 0, dtype: str = "float32", shard_size: str = "1GB",
    tokenizer: bool = False, kind: str = "ForCausalLM", **overrides: Any,
) -> Path:
    """Writes a checkpoint of `family` (one of EVERY) to `folder` and returns it.

    `kind` and `overrides` are those of `build`; `shard_size` such as "200KB" splits the weights over files.
    """
    model = build(family, seed=seed, dtype=dtype, kind=kind, **overrides)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if tokenizer:
        write_tokenizer(folder, model.config.vocab_size)
    return folder


def build(
    family: str, *, seed: int = 0, dtype: str = "float32", kind: str = "ForCausalLM", **overrides: Any,
) -> Any:
    """transformers' model of `family`, with random weights.

    `kind` is the ending of its class; `overrides` are fields of the transformers config, of which ... (Ellipsis) takes
    one out.
    """
    import torch
    import transformers

    differences = (_SHAPES | ENCODERS)[family][1]
    fields = {name: value for name, value in (SIZES | differences | overrides).items() if value is not ...}
    name = f"{ENCODERS[family][0]}{kind}" if family in ENCODERS else class_name(family).replace("ForCausalLM", kind)
    made = getattr(transformers, name)
    config = made.config_class(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made(config)
        norms = {name for name, part in model.named_modules() if "Norm" in type(part).__name__}
        for part in model.modules():
            if type(part).__name__ == "Conv1D":  # which not every class draws as its config says
                torch.nn.init.normal_(part.weight, std=config.initializer_range)
        for key, tensor in model.named_parameters():
            is_norm = (key.rpartition(".")[0] in norms or "norm" in key) and not key.endswith(PRODUCTS)
            if (is_norm or key.endswith(("scale", "alpha_p", "alpha_n", "_residual"))) and not key.endswith("bias"):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
                if "q_norm" in key and _SHAPES[family][0] in UNSCALED:  # or attention would have one token each
                    tensor.data /= 8
            elif key.endswith("self_attn.A"):
                torch.nn.init.normal_(tensor, std=0.1)
            elif key.endswith(("conv1d.weight", "bias")):
                torch.nn.init.normal_(tensor, std=0.2 if is_norm or "correction" in key else 0.5)
            # What an activation without gates adds for every token alike would dominate.
            elif key.endswith(DOWN) and "attention" not in key:
                with torch.no_grad():
                    tensor -= tensor.mean(tensor.shape.index(max(tensor.shape)), keepdim=True)
        for key, tensor in model.named_buffers():
            if key.endswith(("correction_bias", "expert_bias")):
                torch.nn.init.normal_(tensor, std=0.2)
            elif key.endswith("layer_scalar"):
                tensor.fill_(0.8)
    return model.to(getattr(torch, dtype))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE of at most `vocab_size` tokens, trained on the standard library, with a chat template."""
    (folder / "tokenizer.json").write_text(_trained_tokenizer(vocab_size))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def _trained_tokenizer(vocab_size: int) -> str:
    """The content of tokenizer.json; training takes a quarter of a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]
    tokenizer.train([str(path) for path in sources], trainer)
    return str(tokenizer.to_str())


def edit_config(folder: Path, **fields: Any) -> Path:
    """Replaces fields of the checkpoint's config.json; a field set to ... (Ellipsis) is taken out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


def as_part(text: Path, folder: Path, beginning: str) -> Path:
    """Writes the checkpoint `text` as the part for text of one for images and text, with `beginning` for `model.`."""
    import torch
    from safetensors.torch import load_file, save_file

    fields = json.loads((text / "config.json").read_text())
    [architecture] = fields.pop("architectures")
    shared = {name: fields.pop(name) for name in ("dtype", "quantization_config") if name in fields}
    config = shared | {
        "architectures": [architecture.replace("CausalLM", "ConditionalGeneration")],
        "model_type": fields.pop("model_type").removesuffix("_text"), "eos_token_id": 2, "tie_word_embeddings": False,
        "text_config": fields, "vision_config": {}}
    head = "lm_head." if beginning.startswith("model.") else "language_model.lm_head."
    weights = {name.replace("model.", beginning, 1).replace("lm_head.", head): value
               for name, value in load_file(text / "model.safetensors").items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights | {"vision_tower.embeddings.weight": torch.ones(3)}, folder / "model.safetensors")
    return folder


TIE = 1e-5  # between two logits, of the standard deviation of all


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of the given lengths, without special tokens."""
    import numpy as np

    draw = np.random.default_rng(seed)
    return [draw.integers(3, SIZES["vocab_size"], length).tolist() for length in lengths]


def greedy(folder: Path, asked: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers' `generate` continues each prompt with: float32, greedy, never ending early.

    Generated together, as transformers spends far more on a step than on its rows.  Every token must also be the most
    probable one where all of its sequence is computed at once.
    """
    import torch

    model = reference_model(folder, "float32")
    model.generation_config.eos_token_id = None
    groups = [[ids] for ids in asked] if model.config.model_type in UNPADDED else [asked]
    continuations = []
    with torch.inference_mode(), one_thread():
        if model.config.model_type in COUNTED:
            return [_one_by_one(model, ids, max_tokens) for ids in asked]
        for group in groups:
            longest = max(map(len, group))
            padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in group])
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in group])
            together = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
            continuations += together[:, longest:].tolist()
    best = _best(model, asked, continuations)
    assert [tokens for tokens, _ in best] == continuations, "transformers does not agree with itself"
    return continuations


def _one_by_one(model: Any, ids: list[int], max_tokens: int) -> list[int]:
    """Greedy decoding with `forward`, one token at a time."""
    import torch

    row = list(ids)
    for _ in range(max_tokens):
        row.append(int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return row[len(ids):]


def clear(
    folder: Path, asked: list[list[int]], answers: list[list[int]], number: int,
) -> tuple[list[int], list[list[int]]]:
    """The indices of the first `number` prompts whose tokens are never a matter of rounding, and their greedy tokens.

    `answers` are what a greedy engine continues the prompts with.  transformers computes each sequence once and says
    which token is the most probable after each of its tokens: the answers, if they are right.  Processors round
    differently: where the best two logits differ by less than a `TIE`, either is right.
    """
    best = _best(reference_model(folder, "float32"), asked, answers)
    found = [at for at, (_, margin) in enumerate(best) if margin > TIE][:number]
    assert len(found) == number, "too many ties"
    return found, [best[at][0] for at in found]


def _best(model: Any, asked: list[list[int]], answers: list[list[int]]) -> list[tuple[list[int], float]]:
    """The most probable token at each place of the answers, and the least by which one is ahead of the next.

    In standard deviations of the logits.  Rows are padded behind their tokens, which see nothing of it.
    """
    import torch

    rows = [prompt + answer[:-1] for prompt, answer in zip(asked, answers, strict=True)]
    longest = max(map(len, rows))
    found = []
    with torch.inference_mode(), one_thread():
        together = model(torch.tensor([row + [3] * (longest - len(row)) for row in rows])).logits
        for prompt, row, logits in zip(asked, rows, together, strict=True):
            answer = logits[len(prompt) - 1 : len(row)]
            most, best = answer.topk(2)
            found.append((best[:, 0].tolist(), float(((most[:, 0] - most[:, 1]) / answer.std(1)).min())))
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: products this small lose far more to waiting for each other than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reference_model(folder: Path, dtype: str, kind: str = "AutoModelForCausalLM") -> Any:
    """The checkpoint as transformers loads it; `kind` names one of its automatic classes."""
    import transformers

    config = (folder / "config.json").read_text()
    attention = "eager" if any(name in config for name in NOT_IN_TORCH) else "sdpa"
    return getattr(transformers, kind).from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()

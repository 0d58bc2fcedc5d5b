"""Every field of transformers' config classes is without effect, obeyed as there, or refused by name.

The fields are found by inspection: a release that adds one fails here until it stands in one of the lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import ARE_ALL_ASKED, FAMILIES, build, edit_config, greedy, make, one_thread, prompts
from support.config_fields import FieldLists, distance, editor
from support.ragged import Driver

from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.loading import load_model, read_config
from slotwise.compute.model.model_config import ModelConfig
from slotwise.errors import CheckpointError

pytestmark = pytest.mark.slow

WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LENGTH = 60  # tokens of the prompt, which is longer than every window
COMPARED_AT = [4, LENGTH - 1]  # positions, before and behind the first token that a window leaves out
CLOSE, FAR = 1e-3, 1e-2  # differences of logits: of two ways to compute, and of two models

CALM = {"initializer_range": 0.1}  # recurrent states repeat rounding errors, and wide weights multiply them

# By class: the family of `checkpoints`, and fields that make others matter.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaConfig": ("llama2", {}),
    "MistralConfig": ("mistral", {"sliding_window": 20}),
    "Qwen2Config": ("qwen2", WINDOWS | {"num_key_value_heads": 2}),
    "Qwen3Config": ("qwen3", WINDOWS),
    "Gemma2Config": ("gemma2", {"sliding_window": 20}),
    "Gemma3TextConfig": ("gemma3", {"sliding_window": 20}),
    "Phi3Config": ("phi3", {"sliding_window": 20}),
    "GraniteConfig": ("granite", {}),
    "SmolLM3Config": ("smollm3", {"sliding_window": 20}),
    "Olmo2Config": ("olmo2", {}),
    "Olmo3Config": ("olmo3", {"sliding_window": 20}),
    "MixtralConfig": ("mixtral", {"sliding_window": 20}),
    "Qwen2MoeConfig": ("qwen2_moe", WINDOWS),
    "Qwen3MoeConfig": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "OlmoeConfig": ("olmoe", {}),
    "GraniteMoeConfig": ("granite_moe", {}),
    "GptOssConfig": ("gpt_oss", {"sliding_window": 20}),
    "Qwen3NextConfig": ("qwen3_next", CALM),
    "Qwen3_5TextConfig": ("qwen3_5", CALM),
    "Qwen3_5MoeTextConfig": ("qwen3_5_moe", CALM),
    "MinistralConfig": ("ministral", {"sliding_window": 20}),
    "GlmConfig": ("glm", {}),
    "Glm4Config": ("glm4", {}),
    "Ernie4_5Config": ("ernie4_5", {}),
    "HeliumConfig": ("helium", {}),
    "SeedOssConfig": ("seed_oss", {}),
    "Mamba2Config": ("mamba2", CALM),
    "NemotronHConfig": ("nemotron_h", CALM),
    "FalconH1Config": ("falcon_h1", CALM | {"mamba_d_ssm": None, "mamba_d_head": "auto"}),
    "MambaConfig": ("mamba", CALM),
    "FalconMambaConfig": ("falcon_mamba", CALM),
    "JambaConfig": ("jamba", CALM),
    "Lfm2MoeConfig": ("lfm2_moe", CALM),
    "BambaConfig": ("bamba", CALM | {"mamba_d_head": "auto"}),
    "GraniteMoeHybridConfig": ("granite_hybrid", CALM | {"mamba_d_head": "auto"}),
    "Lfm2Config": ("lfm2", CALM | {"layer_types": ..., "full_attn_idxs": [1]}),
    "Glm4MoeConfig": ("glm4_moe", {}),
    "Dots1Config": ("dots1", {"sliding_window": 20}),
    "MiniMaxM2Config": ("minimax_m2", {}),
    "Ernie4_5_MoeConfig": ("ernie4_5_moe", {}),
    "GraniteMoeSharedConfig": ("granite_moe_shared", {}),
    "GraniteSWAConfig": ("granite_swa", {"sliding_window": 20, "layer_rope_theta": ...}),
    "GraniteMoeSWAConfig": ("granite_moe_swa", {"sliding_window": 20}),
    "FlexOlmoConfig": ("flex_olmo", {}),
    "MellumConfig": ("mellum", {"sliding_window": 20, "layer_types": MIXED[1:] + MIXED[:1],
                                "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "HYV3Config": ("hy_v3", {}),
    "Kolibri1Config": ("kolibri1", {"sliding_window": 20, "layer_types": MIXED[1:] + MIXED[:1]}),
    "AriaTextConfig": ("aria", {}),
    "FlintConfig": ("flint", {"sliding_window": 20}),
    "Llama4TextConfig": ("llama4", {"attention_chunk_size": 20}),
    "HunYuanMoEV1Config": ("hunyuan_moe", {}),
    "PhimoeConfig": ("phimoe", {"sliding_window": 20}),
    "AfmoeConfig": ("afmoe", {"sliding_window": 20, "num_hidden_layers": 4}),
    "SolarOpenConfig": ("solar_open", {}),
    "ExaoneMoeConfig": ("exaone_moe", {"sliding_window": 20, "num_hidden_layers": 4}),
    "GemmaConfig": ("gemma", {}),
    "ApertusConfig": ("apertus", {}),
    "ArceeConfig": ("arcee", {}),
    "Jais2Config": ("jais2", {}),
    "NanoChatConfig": ("nanochat", {}),
    "BitNetConfig": ("bitnet", {}),
    "HyperCLOVAXConfig": ("hyperclovax", {}),
    "Gemma4UnifiedTextConfig": ("gemma4_unified", CALM | {
        "sliding_window": 20, "num_hidden_layers": 6, "layer_types": ..., "global_head_dim": ...}),
    "BloomConfig": ("bloom", {"n_head": 4, "apply_residual_connection_post_layernorm": False}),
    "MptConfig": ("mpt", {"n_heads": 4}),
    "FalconConfig": ("falcon_new", {}),
    "CohereConfig": ("cohere", {}),
    "Cohere2Config": ("cohere2", {"sliding_window": 20, "layer_types": ...}),
    "Gemma4TextConfig": ("gemma4", CALM | {
        "sliding_window": 20, "num_hidden_layers": 12, "layer_types": ..., "global_head_dim": ...,
        "use_double_wide_mlp": False, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
        "moe_intermediate_size": 64}),
    "Gemma3nTextConfig": ("gemma3n", {
        "sliding_window": 20, "num_hidden_layers": 10, "layer_types": ..., "intermediate_size": 160,
        "activation_sparsity_pattern": ...}),
    "VaultGemmaConfig": ("vaultgemma", {"sliding_window": 20}),
    "CwmConfig": ("cwm", {"sliding_window": 20}),
    "Ministral3Config": ("ministral3", {"sliding_window": 20}),
    "HunYuanDenseV1Config": ("hunyuan", {}),
    "DeepseekV2Config": ("deepseek_v2", {}),
    "DeepseekV3Config": ("deepseek_v3", {}),
    "DeepseekV32Config": ("deepseek_v32", {}),
    "GlmMoeDsaConfig": ("glm_moe_dsa", {"indexer_types": ...}),
    "Glm4MoeLiteConfig": ("glm4_moe_lite", {"mlp_layer_types": ...}),
    "AXK1Config": ("axk1", {"mlp_layer_types": ...}),
    "YoutuConfig": ("youtu", {}),
    "MiniCPM3Config": ("minicpm3", {}),
    "Apertus1p5TextConfig": ("apertus1p5", {}),
    "CohereCompassTextConfig": ("cohere_compass", {
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "Cohere2MoeConfig": ("cohere2_moe", {
        "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "DbrxConfig": ("dbrx", {}),
    "DiffLlamaConfig": ("diffllama", {}),
    "DogeConfig": ("doge", {}),
    "LagunaConfig": ("laguna", {
        "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    "KimiLinearConfig": ("kimi_linear", CALM | {"n_group": 2, "topk_group": 1, "num_local_experts": 16}),
    "Exaone4Config": ("exaone4", {"sliding_window": 20, "num_hidden_layers": 4}),
}
BASES |= {
    "GPT2Config": ("gpt2", {}),
    "GPTBigCodeConfig": ("gpt_bigcode", {}),
    "GPTNeoXConfig": ("gpt_neox", {}),
    "GPTNeoXJapaneseConfig": ("gpt_neox_japanese", {}),
    "GPTNeoConfig": ("gpt_neo", {"window_size": 20, "attention_types": [[["global", "local", "local"], 1]],
                                 "num_layers": 3}),
    "GPTJConfig": ("gptj", {}),
    "CodeGenConfig": ("codegen", {}),
    "PhiConfig": ("phi", {}),
    "StableLmConfig": ("stablelm_12b", {}),
    "Starcoder2Config": ("starcoder2", {"sliding_window": 20}),
    "PersimmonConfig": ("persimmon", {"qk_layernorm": True}),
    "NemotronConfig": ("nemotron", {}),
    "OlmoConfig": ("olmo", {"clip_qkv": 2.0}),
    "OPTConfig": ("opt_350m", {"init_std": 0.2}),
    "XGLMConfig": ("xglm", {}),
    "BioGptConfig": ("biogpt", {}),
    "CTRLConfig": ("ctrl", {}),
    "OpenAIGPTConfig": ("openai_gpt", {"initializer_range": 0.2}),
    "BertConfig": ("bert_decoder", {"initializer_range": 0.2}),
    "ErnieConfig": ("ernie", {"initializer_range": 0.2}),
    "BertGenerationConfig": ("bert_generation", {"initializer_range": 0.2}),
    "MegatronBertConfig": ("megatron_bert", {}),
}
COMPARED = [name for name, (family, _) in BASES.items() if family in FAMILIES]
READ_BESIDE = {  # fields that transformers obeys, but the class does not list
    "MistralConfig": {"layer_types"}, "Gemma3TextConfig": {"sliding_window_pattern"},
    "Cohere2Config": {"sliding_window_pattern"}}
DERIVED = (  # that transformers writes, from other fields
    "layer_types", "attention_layers", "no_rope_layers", "mlp_layer_types", "layers_block_type", "per_layer_config",
    "moe_layers")
# Classes whose layer types are not derived.
NOT_DERIVED = ("GraniteMoeHybridConfig", "KimiLinearConfig", "Lfm2MoeConfig", "NemotronHConfig")

# Values that change nothing, neither in transformers' logits nor in what Slotwise reads.
NOTHING: dict[str, Any] = {
    "transformers_version": "4.1.0", "output_hidden_states": True, "return_dict": False, "chunk_size_feed_forward": 4,
    "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression", "num_labels": 3,
    "initializer_range": 0.9, "use_cache": False, "pad_token_id": 5, "bos_token_id": 5, "attention_dropout": 0.5,
    "pretraining_tp": 2, "name_or_path": "elsewhere", "output_attentions": True, "altup_coef_clip": 0.1,
    "eod_token_id": 5,
    "allow_global_per_layer_attribute_access": True, "serialize_explicit_per_layer_config": True,
    "resid_pdrop": 0.5, "embd_pdrop": 0.5, "original_max_position_embeddings": 512, "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5, "output_router_logits": False, "residual_dropout": 0.5,
    "block_multiple_of": 32, "block_ffn_dim_multiplier": 2.0,
    "sep_token_id": 5, "input_jitter_noise": 0.5,
    "mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"], "enable_moe_fp32_combine": False,
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0,
}  # fmt: skip

# Values that the same weights obey: the logits change, in both alike.
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
EDITED: dict[str, Any] = {
    "rms_norm_eps": 0.5, "rope_parameters": LINEAR, "rope_scaling": LINEAR, "sliding_window": 9,
    "use_sliding_window": False, "max_window_layers": 2, "layer_types": MIXED, "query_pre_attn_scalar": 80,
    "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0, "sliding_window_pattern": 3,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.5,
    "no_rope_layers": [1, 1, 0, 1], "no_rope_layer_interval": 3, "num_experts_per_tok": 1, "norm_topk_prob": True,
    "swiglu_alpha": 0.5, "swiglu_limit": 0.3, "norm_eps": 0.5,
    "attn_scale": 2.0, "attn_temperature_tuning": False, "floor_scale": 4, "attention_chunk_size": 9,
    "lm_head_bias": False,
    "moe_k": 1, "moe_topk": 1, "moe_norm_min": 0.9, "layer_rope_theta": [5e5, 1e4, 1e4], "router_scaling_factor": 1.0,
    "route_scale": 0.7, "mup_enabled": False, "global_attn_every_n_layers": 3,
    "n_group": 2, "topk_group": 3, "routed_scaling_factor": 2.2,
    "altup_active_idx": 0, "altup_correct_scale": False, "num_kv_shared_layers": 5,
    "activation_sparsity_pattern": [0.5, 0.9] * 5, "top_k_experts": 1,
}  # fmt: skip

# Values that other weights obey: a checkpoint is made with each.
BUILT: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": ..., "attention_bias": True, "mlp_bias": True,
    "num_experts": 5, "num_local_experts": 5, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "linear_conv_kernel_dim": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_value_heads": 8,
    "linear_num_key_heads": 4, "conv_bias": True, "conv_L_cache": 2, "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [0, 1],
    "moe_layers": [0, 2], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 96,
    "moe_num_experts": 5, "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 1,
    "moe_num_shared_experts": 1, "shared_intermediate_size": 32, "num_dense_layers": 2,
    "n_routed_experts": 12, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 2,
    "mlp_layer_types": ["sparse", "dense", "sparse"], "use_qk_norm": False,
    "attention_k_eq_v": True, "enable_moe_block": True, "use_double_wide_mlp": True,
    "altup_num_inputs": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 900,
    "decoder_sparse_step": 3, "mlp_only_layers": [0], "qkv_bias": False, "use_bias": False, "attention_out_bias": False,
}  # fmt: skip

# Values that the reader obeys without the logits: what must be read from them.
READ: dict[str, tuple[Any, Callable[[ModelConfig], Any], Any]] = {
    "dtype": ("bfloat16", lambda config: config.dtype, torch.bfloat16),
    "torch_dtype": ("bfloat16", lambda config: config.dtype, torch.bfloat16),
    "eos_token_id": ([7, 9], lambda config: config.eos_token_ids, (7, 9)),
    "max_position_embeddings": (128, lambda config: config.max_position_embeddings, 128),
}
REFUSED: dict[str, Any] = {
    "hidden_act": "gelu", "hidden_activation": "relu", "is_encoder_decoder": True, "model_type": "opt",
    "architectures": ["OPTForCausalLM"], "per_layer_config": {"0": {"intermediate_size": 64}},
    "use_bidirectional_attention": True, "clip_qkv": 8.0,
}  # fmt: skip
# Of layers with states.
NOTHING |= {
    "chunk_size": 32, "mamba_chunk_size": 32, "rescale_prenorm_residual": False, "residual_in_fp32": False,
    "time_step_floor": 0.5, "time_step_max": 0.5, "time_step_min": 0.5, "time_step_rank": 7, "num_logits_to_keep": 3,
    "z_loss_coefficient": 0.5, "time_step_init_scheme": "constant", "time_step_scale": 0.5, "use_mambapy": True,
    "use_associative_scan": False, "use_mamba_kernels": False, "hidden_dropout": 0.5,
    "mamba_ssm_cache_dtype": "float16", "moe_latent_size": 32, "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_overlap": False, "mtp_layers_block_type": ["moe"]}
EDITED |= {"layer_norm_epsilon": 0.5, "time_step_limit": [0.5, 0.6], "position_embedding_type": "rope",
           "mixer_rms_eps": 0.5, "mamba_norm_before_gate": False, "key_multiplier": 0.9, "lm_head_multiplier": 0.8,
           "mlp_multipliers": [0.5, 0.7], "attention_out_multiplier": 0.6, "attention_in_multiplier": 1.3,
           "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7], "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 1.4,
           "mlp_hidden_act": "silu"}
REFUSED |= {"mamba_hidden_act": "relu"}
BUILT |= {
    "expand": 1, "conv_kernel": 2, "n_groups": 4, "num_heads": 4, "state_size": 7, "use_conv_bias": False,
    "mamba_conv_bias": False, "mamba_d_conv": 2, "mamba_d_head": 24, "mamba_d_state": 7, "mamba_expand": 2,
    "mamba_n_groups": 4, "mamba_n_heads": 4, "mamba_proj_bias": True, "attn_layer_indices": [0, 3],
    "shared_intermediate_size": 32, "attn_layer_offset": 2, "attn_layer_period": 2, "expert_layer_offset": 0,
    "expert_layer_period": 3, "mamba_dt_rank": 9, "num_dense_layers": 2, "use_expert_bias": False,
    "mamba_head_dim": 16, "mamba_num_heads": 6, "ssm_state_size": 7, "mamba_d_ssm": 48, "mamba_rms_norm": False,
    "projectors_bias": True, "layers_block_type": ["linear_attention", "full_attention", "mlp"]}
# Of compressed attention.
NOTHING |= {"qk_head_dim": 77, "embedding_initializer_range": 0.5}
EDITED |= {
    "topk_method": "greedy", "rope_interleave": False, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 32}
BUILT |= {
    "kv_lora_rank": 24, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 20,
    "index_n_heads": 4, "index_head_dim": 24, "indexer_types": ["full", "full", "shared"]}
READ |= dict.fromkeys(("index_topk", "keep_window_size"), (100, lambda config: config.max_position_embeddings, 100))
# Of families with ALiBi, and Cohere's.
NOTHING |= {"hidden_dropout": 0.5, "learned_pos_emb": False, "init_device": "cuda",
            "emb_pdrop": 0.5, "multi_query": False}
EDITED |= {"apply_residual_connection_post_layernorm": True, "attn_config": {"clip_qkv": 1.0}, "alibi": True,
           "activation": "relu", "layer_norm_eps": 0.5, "logit_scale": 0.7, "n_head": 8, "n_heads": 8}
BUILT |= {
    "use_post_norm": False, "n_layer": 5, "d_model": 128, "n_layers": 5, "num_kv_heads": 1, "bias": False,
    "new_decoder_architecture": False, "ffn_hidden_size": 100, "num_ln_in_parallel_attn": 1}
READ |= {"max_seq_len": (128, lambda config: config.max_position_embeddings, 128)}
REFUSED |= {"expansion_ratio": 2, "no_bias": False, "embedding_fraction": 0.5, "norm_type": "rmsnorm",
            "parallel_attn": False, "slow_but_exact": True}
# Of classics.
NOTHING |= {
    "attn_pdrop": 0.5, "reorder_and_upcast_attn": True, "summary_activation": "tanh", "summary_first_dropout": 0.5,
    "summary_proj_to_labels": False, "summary_type": "first", "summary_use_proj": False, "classifier_dropout": 0.5,
    "attention_softmax_in_fp32": False, "scale_attention_softmax_in_fp32": False, "hidden_dropout": 0.5,
    "is_decoder": True, "embed_dropout": 0.5, "resid_dropout": 0.5, "n_ctx": 77, "embedding_dropout": 0.5,
    "dropout": 0.5, "init_std": 0.9, "layerdrop": 0.5, "activation_dropout": 0.5, "decoder_start_token_id": 5,
    "attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.5}
EDITED |= {
    "activation_function": "silu", "scale_attn_weights": False, "layer_norm_eps": 0.5, "rotary_dim": 8,
    "attention_layers": ["local", "global", "global"], "attention_types": [[["local"], 1], [["global"], 2]],
    "window_size": 9, "norm_epsilon": 0.5, "scale_embedding": False, "afn": "silu", "use_parallel_residual": False}
BUILT |= {
    "n_embd": 128, "n_inner": 192, "n_positions": 100,
    "intermediate_multiple_size": 3, "num_layers": 5, "qk_layernorm": False, "use_qkv_bias": False,
    "do_layer_norm_before": True, "enable_bias": False, "ffn_dim": 192, "layer_norm_elementwise_affine": False,
    "word_embed_proj_dim": 48, "attention_heads": 8, "d_model": 128, "dff": 192}
BUILT |= {"type_vocab_size": 3}
NOTHING |= {"task_type_vocab_size": 5}
REFUSED |= {"use_task_id": True, "add_cross_attention": True, "scale_attn_by_inverse_layer_idx": True}
# Of families of 2025 and 2026.
NOTHING |= {"pooling": "mean", "lambda_std_dev": 0.9, "rope_theta": 5e5}
EDITED |= {
    "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "moe_routed_scaling_factor": 0.7,
    "prefix_dense_sliding_window_pattern": 2, "moe_renormalize": False, "num_expert_group": 2,
    "num_experts_per_token": 1}
BUILT |= {
    "prefix_dense_intermediate_size": 128, "num_attention_heads_per_layer": [6, 4, 4, 6], "gating": "per-element",
    "linear_head_dim": 16, "linear_num_heads": 4}
READ |= {"model_max_length": (128, lambda config: config.max_position_embeddings, 128)}
REFUSED |= {"is_moe": True, "output_vocab_size": 512, "moe_apply_router_weight_on_input": True,
            "moe_router_logit_softcapping": 5.0, "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}
LISTS = (NOTHING, EDITED, BUILT, READ, REFUSED)
# Fields of BUILT that one checkpoint has together: transformers obeys each, so one that Slotwise does not obey shows.
# No size is what another one's rule would give: heads are 32 wide, of hidden states of 128.
TOGETHER = {
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "attention_bias",
    "mlp_bias", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "n_embd",
    "n_inner", "n_head", "d_model", "ffn_dim", "attention_heads", "dff", "n_heads", "num_kv_heads", "conv_bias",
    "tie_word_embeddings", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_num_experts", "mamba_d_conv", "mamba_d_state", "conv_kernel", "state_size",
    "ssm_state_size"}

# Fields of EDITED that one config.json has together, but for `make families`: no field hides the effect of another.
EDITED_TOGETHER = {
    "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "mixer_rms_eps",
    "rope_parameters", "rotary_dim", "sliding_window", "query_pre_attn_scalar", "attn_scale", "floor_scale",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale",
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "norm_topk_prob",
    "routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_routed_scaling_factor", "swiglu_alpha",
    "scale_emb", "scale_depth", "dim_model_base", "scale_attn_weights", "scale_embedding", "hidden_act", "activation",
    "activation_function", "afn", "mlp_hidden_act", "num_attention_heads", "n_head", "num_heads", "attention_heads",
    "key_multiplier", "lm_head_multiplier", "mlp_multipliers", "attention_out_multiplier", "attention_in_multiplier",
    "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "mamba_norm_before_gate",
    "rope_interleave", "use_parallel_residual", "apply_residual_connection_post_layernorm"}

HYBRID = ["full_attention", "linear_attention", "linear_attention", "full_attention"]

# Where a class differs from the others: the list of a field, and its value.
PLAIN = {"rope_type": "default", "rope_theta": 1e5}
UNTURNED = {"rope_scaling": (NOTHING, LINEAR), "rope_parameters": (NOTHING, LINEAR)}
SELECTIVE = {"use_bias": (BUILT, True), "time_step_rank": (BUILT, 9), "expand": (NOTHING, 3)}
PARTIAL = LINEAR | {"partial_rotary_factor": 0.25}
FACTORS = {"short_factor": [1 + i / 4 for i in range(9)], "long_factor": [2.0] * 9}
SHARPENED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
             "llama_4_scaling_beta": 0.7}
LATENT: dict[str, tuple[dict[str, Any], Any]] = {
    "head_dim": (REFUSED, 78), "num_attention_heads": (REFUSED, 8), "num_key_value_heads": (REFUSED, 1)}
INDEXED: dict[str, tuple[dict[str, Any], Any]] = {
    "norm_topk_prob": (EDITED, False), "mlp_bias": (NOTHING, True), "layer_types": (NOTHING, ["indexed_attention"] * 3)}
ACTIVE: dict[str, tuple[dict[str, Any], Any]] = {"hidden_act": (EDITED, "relu")}
TABLE: dict[str, tuple[dict[str, Any], Any]] = {"max_position_embeddings": (BUILT, 100)}
SPLIT: dict[str, tuple[dict[str, Any], Any]] = dict.fromkeys(  # of weights whose shapes do not depend on it
    ("num_attention_heads", "n_head", "num_heads", "attention_heads"), (EDITED, 8))
DECODER = UNTURNED | ACTIVE | TABLE | SPLIT | {
    "is_decoder": (REFUSED, False), "tie_word_embeddings": (REFUSED, False), "chunk_size_feed_forward": (NOTHING, 0)}
COMPUTED = {"n_positions": (READ, (128, lambda config: config.max_position_embeddings, 128))}
OWN: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    "GPT2Config": UNTURNED | SPLIT,
    "GPTBigCodeConfig": UNTURNED | {
        "num_key_value_heads": (NOTHING, 3), "multi_query": (BUILT, False), "n_head": (BUILT, 8)},
    "GPTNeoXConfig": ACTIVE | {"num_attention_heads": (EDITED, 2), "attention_bias": (BUILT, False)},
    "GPTNeoXJapaneseConfig": ACTIVE | SPLIT,
    "GPTNeoConfig": UNTURNED | TABLE | SPLIT | {"num_layers": (REFUSED, 5)},
    "GPTJConfig": UNTURNED | COMPUTED | SPLIT,
    "CodeGenConfig": UNTURNED | COMPUTED | SPLIT,
    "PhiConfig": ACTIVE,
    "StableLmConfig": ACTIVE | {"num_attention_heads": (BUILT, 2), "use_parallel_residual": (BUILT, False)},
    "Starcoder2Config": ACTIVE,
    "PersimmonConfig": ACTIVE,
    "NemotronConfig": ACTIVE,
    "OlmoConfig": ACTIVE | {"clip_qkv": (EDITED, 0.5)},
    "OPTConfig": UNTURNED | TABLE | SPLIT | {
        "model_type": (REFUSED, "gpt2"), "architectures": (REFUSED, ["T5ForConditionalGeneration"])},
    "XGLMConfig": UNTURNED | SPLIT | {"pad_token_id": (EDITED, 5)},
    "BioGptConfig": UNTURNED | ACTIVE | TABLE | SPLIT | {"layer_norm_eps": (NOTHING, 0.5)},
    "CTRLConfig": UNTURNED | COMPUTED | SPLIT | {"layer_norm_epsilon": (EDITED, 9.0)},
    "OpenAIGPTConfig": UNTURNED | SPLIT,
    "CohereCompassTextConfig": {
        "rope_parameters": (EDITED, {"sliding_attention": LINEAR, "full_attention": None}),
        "rope_scaling": (REFUSED, LINEAR), "num_hidden_layers": (REFUSED, 5)},
    "Cohere2MoeConfig": {
        "num_hidden_layers": (REFUSED, 5), "sliding_window_pattern": (NOTHING, 3),
        "rope_scaling": (REFUSED, LINEAR),
        "norm_topk_prob": (NOTHING, False), "mlp_layer_types": (BUILT, ["sparse", "dense", "sparse", "sparse"])},
    "DbrxConfig": {
        "attn_config": (EDITED, {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0}), "n_heads": (BUILT, 8),
        "num_key_value_heads": (NOTHING, 1), "tie_word_embeddings": (REFUSED, True)},
    "DiffLlamaConfig": {
        "attention_dropout": (NOTHING, 0.0), "num_key_value_heads": (BUILT, 4), "attention_bias": (BUILT, False)},
    "DogeConfig": {
        "num_experts": (NOTHING, 5), "num_experts_per_tok": (NOTHING, 1), "norm_topk_prob": (NOTHING, True),
        "attention_bias": (BUILT, False)},
    "LagunaConfig": {
        "rope_parameters": (EDITED, {"full_attention": LINEAR, "sliding_attention": PLAIN}),
        "rope_scaling": (REFUSED, LINEAR), "num_hidden_layers": (REFUSED, 5), "num_attention_heads": (NOTHING, 8),
        "num_key_value_heads": (BUILT, 1), "mlp_layer_types": (BUILT, ["sparse", "dense", "sparse", "sparse"])},
    "KimiLinearConfig": LATENT | {
        "head_dim": (NOTHING, 16), "rope_scaling": (NOTHING, LINEAR), "num_hidden_layers": (REFUSED, 5),
        "layer_types": (BUILT, HYBRID), "mlp_layer_types": (BUILT, ["sparse", "dense", "sparse", "sparse"]),
        "num_experts": (BUILT, 12), "num_expert_group": (EDITED, 1), "topk_group": (EDITED, 2),
        **{name: (REFUSED, value) for name, value in (  # under another name than the file's
            ("norm_topk_prob", False), ("num_experts_per_tok", 1), ("n_group", 4), ("num_local_experts", 12),
            ("n_shared_experts", 1), ("max_position_embeddings", 128))}},
    "BertConfig": DECODER,
    "ErnieConfig": DECODER,
    "BertGenerationConfig": DECODER,
    "MegatronBertConfig": DECODER,
    "Gemma3TextConfig": {
        "use_bidirectional_attention": (READ, (True, lambda config: not config.is_causal, True)),
        "attn_logit_softcapping": (REFUSED, 2.0),
        "rope_parameters": (EDITED, {"full_attention": LINEAR, "sliding_attention": PLAIN}),
    },
    "Olmo3Config": {"rope_parameters": (EDITED, {"full_attention": LINEAR, "sliding_attention": PLAIN})},
    "Phi3Config": {
        "rope_parameters": (EDITED, PLAIN | {"partial_rotary_factor": 0.5}),
        "rope_scaling": (EDITED, PLAIN | FACTORS | {"rope_type": "longrope", "partial_rotary_factor": 0.75}),
        "head_dim": (NOTHING, 24),
    },
    "Qwen2MoeConfig": {"max_window_layers": (EDITED, 3)},
    "Qwen3MoeConfig": {"norm_topk_prob": (EDITED, False), "mlp_only_layers": (BUILT, [1]),
                       "num_experts": (REFUSED, 5)},  # beside num_local_experts
    "GptOssConfig": {"attention_bias": (BUILT, False)},
    "Mamba2Config": UNTURNED | {"use_bias": (BUILT, True)} | {
        name: (REFUSED, value) for name, value in (
            ("expand", 1), ("num_heads", 4), ("head_dim", 12), ("hidden_size", 128))},
    "NemotronHConfig": UNTURNED | {
        "use_bias": (BUILT, True), "time_step_min": (EDITED, 0.9), "time_step_limit": (NOTHING, [0.5, 0.6]),
        "mamba_proj_bias": (NOTHING, True), "attention_bias": (NOTHING, True), "expand": (NOTHING, 3),
        "num_hidden_layers": (NOTHING, 3), "sliding_window": (NOTHING, 9), "hidden_act": (NOTHING, "gelu"),
        "layer_types": (NOTHING, ["mlp"]), "num_heads": (NOTHING, 3), "rescale_prenorm_residual": (NOTHING, True),
        **{name: (NOTHING, value) for name, value in (
            ("n_routed_experts", 4), ("n_shared_experts", 2), ("moe_intermediate_size", 32), ("n_group", 2),
            ("topk_group", 2), ("routed_scaling_factor", 2.0), ("num_experts_per_tok", 1), ("norm_topk_prob", False),
            ("num_local_experts", 4))}},
    "FalconH1Config": {
        "embedding_multiplier": (EDITED, 2.0), "mamba_d_head": (REFUSED, 24), "mamba_d_ssm": (BUILT, 48),
        "layers_block_type": (NOTHING, ["hybrid"] * 3), "layer_types": (NOTHING, ["hybrid"] * 3)},
    "MambaConfig": UNTURNED | SELECTIVE,
    "FalconMambaConfig": UNTURNED | SELECTIVE,
    "JambaConfig": UNTURNED | {"num_experts": (BUILT, 5), "num_local_experts": (REFUSED, 5)},
    "Lfm2MoeConfig": {"layer_types": (BUILT, ["conv", "full_attention", "full_attention", "conv"]),
                      "norm_topk_prob": (EDITED, False), "num_hidden_layers": (REFUSED, 5)},
    "BambaConfig": {
        "mamba_d_head": (REFUSED, 24), "rope_scaling": (EDITED, PARTIAL), "rope_parameters": (EDITED, PARTIAL)},
    "GraniteMoeHybridConfig": UNTURNED | {
        "mamba_d_head": (REFUSED, 24), "layer_types": (BUILT, HYBRID), "num_hidden_layers": (REFUSED, 5)},
    "Lfm2Config": {"layer_types": (BUILT, ["conv", "full_attention", "full_attention", "conv"])},
    "Qwen3NextConfig": {"layer_types": (BUILT, HYBRID), "norm_topk_prob": (EDITED, False)},
    "Qwen3_5TextConfig": {"layer_types": (BUILT, HYBRID)},
    "Qwen3_5MoeTextConfig": {"layer_types": (BUILT, HYBRID), "attention_bias": (BUILT, False)},
    "Glm4MoeConfig": {"norm_topk_prob": (EDITED, False)},
    "MellumConfig": {
        "rope_scaling": (REFUSED, LINEAR),
        "norm_topk_prob": (EDITED, False), "mlp_layer_types": (BUILT, ["dense", "sparse", "sparse"]),
        "num_experts": (REFUSED, 5),  # beside num_local_experts
        "rope_parameters": (EDITED, {"full_attention": LINEAR, "sliding_attention": PLAIN})},
    "FlexOlmoConfig": {"norm_topk_prob": (READ, (True, lambda config: config.mixture.routing.is_normalized, True))},
    "Kolibri1Config": {"num_experts": (REFUSED, 5), },
    "Llama4TextConfig": {
        "no_rope_layers": (EDITED, [0, 1, 1, 1]), "no_rope_layer_interval": (EDITED, 2), "use_qk_norm": (EDITED, False),
        "layer_types": (EDITED, ["full_attention", "chunked_attention", "chunked_attention", "full_attention"])},
    "PhimoeConfig": {
        "rope_parameters": (EDITED, PLAIN), "rope_scaling": (EDITED, PLAIN), "num_experts_per_tok": (REFUSED, 1),
        "router_jitter_noise": (EDITED, 0.05), "attention_bias": (BUILT, False)},
    "FlintConfig": {"norm_topk_prob": (EDITED, False), "mlp_only_layers": (BUILT, [1])},
    "Dots1Config": {"norm_topk_prob": (EDITED, False)},
    "SolarOpenConfig": {"norm_topk_prob": (EDITED, False)},
    "ExaoneMoeConfig": {"norm_topk_prob": (EDITED, False), "num_experts": (BUILT, 12),
                        "mlp_layer_types": (BUILT, ["sparse", "dense", "sparse", "dense"])},
    "DeepseekV2Config": LATENT | {"norm_topk_prob": (NOTHING, True), "mlp_bias": (REFUSED, True)},
    "DeepseekV3Config": LATENT | {"norm_topk_prob": (EDITED, False)},
    "DeepseekV32Config": LATENT | INDEXED,
    "GlmMoeDsaConfig": LATENT | INDEXED,
    "Glm4MoeLiteConfig": LATENT | {"norm_topk_prob": (EDITED, False), "attention_bias": (BUILT, False)},
    "AXK1Config": LATENT | {"norm_topk_prob": (EDITED, False)},
    # Its initialization clears the padding's row of the embedding again, behind the weights that were read.
    "YoutuConfig": LATENT | {"pad_token_id": (NOTHING, 0), "rope_interleave": (EDITED, True)},
    "MiniCPM3Config": LATENT,
    "GlmConfig": {"attention_bias": (BUILT, False)},
    "Glm4Config": {"attention_bias": (BUILT, False)},
    "SeedOssConfig": {"attention_bias": (BUILT, False), "mlp_bias": (BUILT, False)},
    "Gemma3nTextConfig": {
        "rope_parameters": (EDITED, {"full_attention": LINEAR, "sliding_attention": PLAIN}),
        "intermediate_size": (BUILT, [192] * 10), "num_hidden_layers": (BUILT, 12)},
    "Gemma4TextConfig": {
        "rope_parameters": (EDITED, {"full_attention": PLAIN | {"rope_type": "proportional", "factor": 2.0,
                                                                "partial_rotary_factor": 0.5},
                                     "sliding_attention": LINEAR}),
        "num_hidden_layers": (BUILT, 18), "layer_types": (BUILT, MIXED[:2] * 6), "enable_moe_block": (BUILT, False),
        "vocab_size_per_layer_input": (BUILT, 1100),
        "use_bidirectional_attention": (REFUSED, "all"), "rope_scaling": (REFUSED, LINEAR)},
    "MptConfig": {"logit_scale": (REFUSED, 0.5), "rope_scaling": (NOTHING, LINEAR)},
    "BloomConfig": {"rope_scaling": (NOTHING, LINEAR)},
    "CohereConfig": {"use_qk_norm": (BUILT, False)},
    "ArceeConfig": {"hidden_act": (EDITED, "gelu"), "mlp_bias": (BUILT, False)},
    "Jais2Config": {"hidden_act": (EDITED, "gelu"), "mlp_bias": (BUILT, False), "attention_bias": (BUILT, False)},
    "NanoChatConfig": {"hidden_act": (EDITED, "gelu")},
    "Gemma4UnifiedTextConfig": {
        "rope_parameters": (EDITED, {"full_attention": PLAIN, "sliding_attention": LINEAR}),
        "num_hidden_layers": (BUILT, 12), "layer_types": (BUILT, MIXED[:2] * 3), "num_kv_shared_layers": (NOTHING, 0),
        "use_double_wide_mlp": (NOTHING, True),
        "use_bidirectional_attention": (REFUSED, "all"), "rope_scaling": (REFUSED, LINEAR)},
    "GemmaConfig": {"hidden_act": (REFUSED, "relu")},
    "Ministral3Config": {"rope_parameters": (EDITED, SHARPENED), "rope_scaling": (EDITED, SHARPENED)},
    "HeliumConfig": {"head_dim": (REFUSED, 16), "hidden_size": (REFUSED, 128), "num_attention_heads": (REFUSED, 8)},
}


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


FIELDS = FieldLists(LISTS, OWN, class_of, READ_BESIDE)
listed = FIELDS.listed


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each class, without the layer types that transformers derives from other fields."""

    @cache
    def of(name: str) -> Path:
        family, fields = BASES[name]
        folder = make(family, tmp_path_factory.mktemp(name) / "model", **fields)
        (folder / "generation_config.json").unlink()
        derived = {field: ... for field in DERIVED if fields.get(field, ...) is ...}
        return folder if name in NOT_DERIVED else edit_config(folder, **derived)

    return of


@pytest.fixture(scope="module")
def base_logits(base: Callable[[str], Path]) -> Callable[[str], torch.Tensor]:
    return cache(lambda name: theirs(base(name)))


@pytest.fixture
def edited(base: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    return editor(base, tmp_path / "edited")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def theirs(folder: Path) -> torch.Tensor:
    """What `logits_of` gives for a checkpoint.

    Results are asked for as objects: transformers' own models fail where a config.json asks for tuples.
    """
    from transformers import AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    return logits_of(AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation=attention_of(fields.get("alibi")), return_dict=True))


def attention_of(alibi: object) -> str:
    """Falcon's eager attention adds ALiBi twice."""
    return "sdpa" if alibi is True else "eager"


def logits_of(model: Any) -> torch.Tensor:
    """The logits `[positions, vocabulary]` that transformers gives at the positions of COMPARED_AT."""
    model.eval()
    with torch.inference_mode():
        return model(torch.tensor(prompts([LENGTH])) % model.config.vocab_size).logits[0, COMPARED_AT]


def ours(folder: Path) -> torch.Tensor:
    decoder = load_model(folder, kernels=ReferenceKernels(), dtype="float32")
    [ids] = prompts([LENGTH])
    return Driver(decoder).step([(0, [token % decoder.config.vocab_size for token in ids])], COMPARED_AT)


@pytest.mark.parametrize("name", BASES)
def test_every_field_stands_in_one_list(name: str) -> None:
    FIELDS.check_that_each_stands_in_one(name)


def test_the_lists_name_fields_that_exist() -> None:
    FIELDS.check_that_each_exists(BASES)


@pytest.mark.parametrize("name", COMPARED)
def test_what_changes_nothing(name: str, base: Callable[[str], Path], base_logits: Callable[[str], torch.Tensor],
                              edited: Callable[..., Path]) -> None:
    config, logits = read_config(base(name)), base_logits(name)
    fields = listed(name, NOTHING)
    folder = edited(name, **fields)  # one that mattered would show among all
    assert distance(theirs(folder), logits) <= CLOSE, fields
    assert read_config(folder) == config, fields


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_obeyed(name: str, base: Callable[[str], Path], base_logits: Callable[[str], torch.Tensor],
                        edited: Callable[..., Path]) -> None:
    config, logits = read_config(base(name)), base_logits(name)
    fields = listed(name, EDITED)
    together = {} if ARE_ALL_ASKED else {field: value for field, value in fields.items() if field in EDITED_TOGETHER}
    single = ({field: value} for field, value in fields.items() if field not in together)
    for changed in filter(None, [together, *single]):
        folder = edited(name, **{
            field: (MIXED * 4)[: config.num_layers] if value is MIXED else value for field, value in changed.items()})
        expected = theirs(folder)
        assert distance(expected, logits) > FAR, f"{changed}: values that tell nothing"
        assert distance(ours(folder), expected) <= CLOSE, changed


@pytest.mark.parametrize("name", COMPARED)
def test_what_other_weights_obey(name: str, base: Callable[[str], Path], edited: Callable[..., Path],
                                 tmp_path: Path) -> None:
    family, own = BASES[name]
    fields = listed(name, BUILT)
    if "tie_word_embeddings" in fields:
        fields["tie_word_embeddings"] = not read_config(base(name)).tie_word_embeddings
    together = {field: value for field, value in fields.items() if field in TOGETHER}
    single = ({field: value} for field, value in fields.items() if field not in together)
    for number, changed in enumerate([together, *single]):
        kept = {name: ... if "num_hidden_layers" in changed and name in DERIVED else given
                for name, given in own.items()}
        model = build(family, **kept | changed)
        model.set_attn_implementation(attention_of(getattr(model.config, "alibi", None)))
        folder = tmp_path / f"built-{number}"
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text()).items() >= changed.items()
        assert distance(ours(folder), logits_of(model)) <= CLOSE, changed
    for field, value in fields.items():
        if field != "tie_word_embeddings":  # see test_checkpoint.py
            with pytest.raises(CheckpointError, match=r"has shape|lacks|leaves no room|must be|names"):
                load_model(edited(name, **{field: value}), kernels=ReferenceKernels())


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_read(name: str, edited: Callable[..., Path]) -> None:
    from transformers import AutoConfig

    for field, (value, read, expected) in listed(name, READ).items():
        folder = edited(name, **({"dtype": ...} if field == "torch_dtype" else {}) | {field: value})
        assert read(read_config(folder)) == expected
        loaded = getattr(AutoConfig.from_pretrained(folder), field)
        assert loaded == (list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_refused(name: str, edited: Callable[..., Path]) -> None:
    FIELDS.check_refused(name, REFUSED, edited)


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_absent_is_as_in_transformers_or_refused(name: str, edited: Callable[..., Path]) -> None:
    assert FIELDS.check_absent(name, edited, EDITED, BUILT) >= 2


def test_a_mistral_with_layer_types_continues_as_transformers_does(tmp_path: Path) -> None:
    """Its windows are those of the layers named, and not of all."""
    folder = edit_config(make("mistral", tmp_path / "model", sliding_window=16), layer_types=MIXED)
    asked = prompts([70, 40, 9], seed=5)
    expected = greedy(folder, asked, 32)
    assert Driver(load_model(folder, kernels=ReferenceKernels(), dtype="float32")).greedy(asked, 32) == expected
    edit_config(folder, layer_types=...)
    assert Driver(load_model(folder, kernels=ReferenceKernels(), dtype="float32")).greedy(asked, 32) != expected

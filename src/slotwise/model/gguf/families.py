"""What architectures of GGUF files say beside the common keys, as fields of a config.json.

`common` are the fields that are known by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotwise.model.gguf.keys import Fields, Keys
from slotwise.model.gguf.ropes import theta

MAX_CAP = 1e6
MAX_EXPERTS = 4096
GEMMA2_LARGEST, GEMMA3_LARGEST = 46, 62  # layers of the models whose scores are scaled by another size than a head's
FULL, SLIDING = "full_attention", "sliding_attention"


def gemma2(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return {
        "query_pre_attn_scalar": _scale(common, GEMMA2_LARGEST),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0, maximum=MAX_CAP),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0, maximum=MAX_CAP),
        "sliding_window": keys.integer("attention.sliding_window", default=4096)}


def gemma3(keys: Keys, common: Mapping[str, Any]) -> Fields:
    """Without a window every layer has full attention; with one, the last of six."""
    window, local = keys.has("attention.sliding_window"), theta(keys, "rope.freq_base_swa", 10_000.0)
    pattern = keys.integer("attention.sliding_window_pattern", default=6)
    kinds = [SLIDING if window and (layer + 1) % pattern else FULL for layer in range(common["num_hidden_layers"])]
    cap = "final_logit_softcapping"
    return {
        "query_pre_attn_scalar": _scale(common, GEMMA3_LARGEST), "layer_types": kinds,
        "sliding_window": keys.integer("attention.sliding_window") if window else None,
        "rope_parameters": {FULL: common["rope_parameters"],
                            SLIDING: {"rope_type": "default", "rope_theta": local}},
    } | ({cap: keys.number(cap, maximum=MAX_CAP)} if keys.has(cap) else {})


def _scale(common: Mapping[str, Any], largest: int) -> float:
    if common["num_hidden_layers"] == largest:
        return float(common["hidden_size"] / common["num_attention_heads"])
    return float(common["head_dim"])


def granite(keys: Keys, common: Mapping[str, Any]) -> Fields:
    """Raises CheckpointError for a model without positions, which llama.cpp tells by a key of another meaning."""
    if not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.error("rope.scaling.finetuned", "is false, which stands for no rotary embedding: not supported")
    return {
        "attention_multiplier": keys.number("attention.scale", common["head_dim"] ** -0.5, maximum=MAX_CAP),
        "embedding_multiplier": keys.number("embedding_scale", 1.0, maximum=MAX_CAP),
        "residual_multiplier": keys.number("residual_scale", 1.0, maximum=MAX_CAP),
        "logits_scaling": keys.number("logit_scale", 1.0, maximum=MAX_CAP)}


def granite_moe(keys: Keys, common: Mapping[str, Any]) -> Fields:
    """Raises CheckpointError for a shared expert, which another family has."""
    shared = "expert_shared_feed_forward_length"
    if keys.integer(shared, default=0, minimum=0):
        raise keys.error(shared, "is set: shared experts are not supported in this architecture")
    return granite(keys, common) | _experts(keys, "num_local_experts")


def gpt_oss(keys: Keys, common: Mapping[str, Any]) -> Fields:
    """Every second layer has a window.

    YaRN does not round the bounds of its blend in the published models, of which files say nothing.
    """
    pattern = keys.integer("attention.sliding_window_pattern", default=2)
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(common["num_hidden_layers"])]
    return _experts(keys, "num_local_experts") | {
        "intermediate_size": keys.integer("expert_feed_forward_length"), "layer_types": kinds,
        "sliding_window": keys.integer("attention.sliding_window"),
        "rope_parameters": {**common["rope_parameters"], "truncate": False}}


def olmo2(keys: Keys, common: Mapping[str, Any]) -> Fields:
    """Raises CheckpointError for OLMo 3, which llama.cpp calls the same, and which has windows."""
    if keys.has("attention.sliding_window"):
        raise keys.error("attention.sliding_window", "is set, which is not supported in this architecture")
    return {}


def phi3(keys: Keys, common: Mapping[str, Any]) -> Fields:
    window = "attention.sliding_window"
    return {"sliding_window": keys.integer(window, minimum=0) or None} if keys.has(window) else {}


def seed_oss(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return {"attention_bias": has_bias(keys, "attn_q"), "attention_out_bias": has_bias(keys, "attn_output")}


def ernie4_5(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return {"use_bias": has_bias(keys, "attn_q")}


def glm4(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return {"attention_bias": has_bias(keys, "attn_q")}


def has_bias(keys: Keys, part: str) -> bool:
    return f"blk.0.{part}.bias" in keys.tensors


def mixtral(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return _experts(keys, "num_local_experts") | {"sliding_window": None}


def olmoe(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return _experts(keys) | {"norm_topk_prob": keys.flag("expert_weights_norm", default=False)}


def qwen3_moe(keys: Keys, common: Mapping[str, Any]) -> Fields:
    return _experts(keys) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "mlp_only_layers": [], "decoder_sparse_step": 1}


def _experts(keys: Keys, count: str = "num_experts") -> Fields:
    """`count` is the name of their number."""
    return {count: keys.integer("expert_count", maximum=MAX_EXPERTS),
            "num_experts_per_tok": keys.integer("expert_used_count", maximum=MAX_EXPERTS)}

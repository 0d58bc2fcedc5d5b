"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with a bias on queries, keys and values, and windows by layer.

Qwen1.5-MoE and Qwen2-57B-A14B have many small experts, and one that all tokens share.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_layer_windows,
    read_mixture,
    read_rope,
    read_window,
    text_part,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields, ConfigDefaults(num_kv_heads=32))
    return replace(config, qkv_bias=True, windows=read_layer_windows(fields))


MULTIMODAL = {"mrope": "default"}  # a type of rotary embedding, for tokens of text
VL_TEXT = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 80}


GOT_TEXT = {
    "vocab_size": 151860, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768, "rope_theta": 1e6,
    "tie_word_embeddings": True}


def configure_got(fields: Fields) -> ModelConfig:
    """The text part of GOT-OCR 2."""
    return configure(text_part(fields, GOT_TEXT))


def configure_vl(fields: Fields) -> ModelConfig:
    """The text part of Qwen2-VL and Qwen2.5-VL, which older configs have next to the other fields."""
    if fields.section("text_config").values:
        fields = text_part(fields, VL_TEXT)
    ropes = (read_rope(fields, 1_000_000.0, aliases=MULTIMODAL),) * fields.integer(
        "num_hidden_layers", maximum=MAX_LAYERS)
    config = read_common(fields, ConfigDefaults(num_kv_heads=8, norm_eps=1e-5), ropes=ropes)
    return replace(config, qkv_bias=True, windows=read_layer_windows(fields))


def configure_moe(fields: Fields) -> ModelConfig:
    config = read_common(fields, ConfigDefaults(num_kv_heads=16))
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    below = fields.integer("max_window_layers", default=28, minimum=0)
    if SLIDING in fields.texts("layer_types") and not fields.flag("use_sliding_window"):
        raise fields.error("layer_types", "asks for sliding attention, but use_sliding_window is false")
    kinds = [SLIDING if window and layer % 2 == 0 and layer < below else FULL for layer in range(config.num_layers)]
    mixture = read_mixture(fields, config, Routing(60, 4, is_normalized=False), intermediate_size=1408)
    shared = fields.integer("shared_expert_intermediate_size", default=5632)
    return replace(
        config,
        qkv_bias=fields.flag("qkv_bias", default=True),
        windows=read_layer_types(fields, window, kinds),
        mixture=replace(mixture, shared_intermediate_size=shared),
    )


experts = functools.partial(
    read_experts, names=ExpertNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"))
"""Reads the experts of a layer; also Qwen3's, which has no shared expert."""


def compose_moe(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, experts)

"""Qwen3 (Yang et al., 2025): Llama with a norm on each head's query and key, and a head size of its own.

The mixtures, such as Qwen3-30B-A3B, have 128 experts; each token chooses eight.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_windows,
    read_mixture,
    read_rope,
    read_window,
    text_part,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

MULTIMODAL = {"mrope": "default"}  # a type of rotary embedding, for tokens of text
VL_TEXT = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 128000}


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, ConfigDefaults(num_kv_heads=32, head_dim=128)),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=read_layer_windows(fields),
    )


def configure_vl(fields: Fields) -> ModelConfig:
    """The text part of Qwen3-VL: the three positions of a token of text are one."""
    fields = text_part(fields, VL_TEXT)
    num_layers, bias = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.flag("attention_bias")
    ropes = (read_rope(fields, 500_000.0, aliases=MULTIMODAL),) * num_layers
    config = read_common(fields, ConfigDefaults(num_kv_heads=32, head_dim=128), ropes=ropes)
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True)


VL_MOE_TEXT = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000, "num_experts_per_tok": 4}
VL_EXPERTS = ExpertNames(stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), are_transposed=True)


def configure_vl_moe(fields: Fields) -> ModelConfig:
    """The text part of Qwen3-VL's mixtures, whose experts lie together in two tensors."""
    config = configure_vl(fields.replaced(text_config={**VL_MOE_TEXT, **fields.section("text_config").values}))
    text = text_part(fields, VL_MOE_TEXT)
    mixture = read_mixture(text, config, Routing(60, 4, is_normalized=True), intermediate_size=1408)
    return replace(config, mixture=mixture)


def compose_vl_moe(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=VL_EXPERTS))


def configure_moe(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, ConfigDefaults(num_kv_heads=4)), fields.flag("attention_bias")
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=(window,) * config.num_layers,
        mixture=read_mixture(fields, config, Routing(128, 8, is_normalized=False), intermediate_size=768),
    )

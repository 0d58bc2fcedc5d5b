"""Mellum (JetBrains, 2026): Qwen3's mixture with windows, MLPs and rotary embeddings by layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERT_SIZE,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mlp_layers,
    read_ropes,
    read_routing,
    read_window,
    refuse_rope_scaling,
)

THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    head_dim = fields.integer("head_dim", default=128)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else (FULL,) * num_layers
    windows, ropes = read_layer_types(fields, read_window(fields, 1024), kinds), read_ropes(fields, THETAS, head_dim)
    fields.refuse(("first_k_dense_replace",), "is set, which this architecture does not have")
    refuse_rope_scaling(fields)
    routing = Routing(64, 8, is_normalized=fields.flag("norm_topk_prob", default=True))
    mixture = MixtureConfig(
        read_routing(fields, routing),
        fields.integer("moe_intermediate_size", default=896, maximum=MAX_EXPERT_SIZE),
        read_mlp_layers(fields, num_layers, 0))
    bias = fields.flag("attention_bias")
    config = read_common(fields, ConfigDefaults(num_kv_heads=4, head_dim=128), ropes=[ropes[kind] for kind in kinds])
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, mixture=mixture)

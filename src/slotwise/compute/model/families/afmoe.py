"""AFMoE (Arcee AI, "Trinity", 2025): norms before and behind attention and MLP, gated attention, windows in three of
four layers, of which alone rotate, and experts chosen by sigmoid scores with a correction.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import glm
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    LEAST_SUM,
    MAX_EXPERT_SIZE,
    MAX_EXPERTS,
    SLIDING,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_layer_types,
    read_routing,
    read_window,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames("mlp.router.gate", correction="mlp.expert_bias")
NORMS = "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
GATED = AttentionOptions(is_gated=True, gate_name="gate_proj")


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields, ConfigDefaults(head_dim=128, norm_eps=1e-5))
    every = fields.integer("global_attn_every_n_layers", default=4)
    kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(config.num_layers)]
    windows, bias = read_layer_types(fields, read_window(fields, 1024), kinds), fields.flag("attention_bias")
    scale, dense = fields.number("route_scale", default=1.0), fields.integer("num_dense_layers", default=1, minimum=0)
    routing = Routing(64, 6, is_normalized=True, scoring="sigmoid", scale=scale, least_sum=LEAST_SUM)
    size = fields.integer("moe_intermediate_size", default=1408, maximum=MAX_EXPERT_SIZE)
    shared = size * fields.integer("num_shared_experts", default=2, minimum=0, maximum=MAX_EXPERTS)
    layers = tuple(layer >= dense for layer in range(config.num_layers))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        has_gated_attention=True,
        windows=windows,
        ropes=tuple(config.ropes[0] if own else NoRope() for own in windows),
        embedding_scale=config.hidden_size**0.5 if fields.flag("mup_enabled") else 1.0,
        mixture=MixtureConfig(read_routing(fields, routing), size, layers, shared),
    )


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return glm.compose(config, source, NORMS, functools.partial(read_experts, names=NAMES), GATED)

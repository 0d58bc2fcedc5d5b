"""Hunyuan 3 (Tencent, 2026): Qwen3 with experts chosen by sigmoid scores with a correction, behind its first layer."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    LEAST_SUM,
    MAX_EXPERT_SIZE,
    MAX_EXPERTS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_mlp_layers,
    read_routing,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames("mlp.router.gate", shared="mlp.shared_mlp", correction="mlp.expert_bias")
DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=11_158_840.0)


def configure(fields: Fields) -> ModelConfig:
    """`enable_moe_fp32_combine` is about roundings of 16-bit types, which are as with it."""
    config, bias = read_common(fields, DEFAULTS), fields.flag("attention_bias")
    scale = fields.number("router_scaling_factor", default=2.826)
    routing = read_routing(fields, Routing(192, 8, is_normalized=True, scoring="sigmoid", scale=scale,
                                           least_sum=LEAST_SUM))
    size = fields.integer("moe_intermediate_size", default=1536, maximum=MAX_EXPERT_SIZE)
    shared = fields.integer("num_shared_experts", default=1, minimum=0, maximum=MAX_EXPERTS) * size
    mixture = MixtureConfig(routing, size, read_mlp_layers(fields, config.num_layers, 1), shared)
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"), qk_norm=True,
                   mixture=mixture)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=NAMES))

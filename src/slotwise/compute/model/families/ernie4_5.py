"""ERNIE 4.5 (Baidu, 2025): Llama that rotates pairs of neighbors; with one MLP in every layer, or with experts chosen
by their softmax and a correction.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_EXPERT_SIZE,
    MAX_EXPERTS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_head_dim,
    read_routing,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

DEFAULTS = ConfigDefaults(
    num_kv_heads=2, head_dim=128, norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, DEFAULTS), fields.flag("use_bias")
    ropes = tuple(replace(rope, has_neighbors=True) for rope in config.ropes)
    return replace(config, ropes=ropes, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


NAMES = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias", is_correction_row=True)


def configure_moe(fields: Fields) -> ModelConfig:
    config = configure(fields if fields.has("num_key_value_heads") or fields.is_null("num_key_value_heads") else Fields(
        {**fields.values, "num_key_value_heads": 4}, fields.where))
    if not fields.has("head_dim"):
        config = replace(config, head_dim=read_head_dim(fields))
    routing = Routing(64, 6, is_normalized=True, least_sum=fields.number("moe_norm_min", default=1e-12))
    routing = read_routing(fields, routing, "moe_num_experts", "moe_k")
    size = fields.integer("moe_intermediate_size", default=1536, maximum=MAX_EXPERT_SIZE)
    first = fields.integer("moe_layer_start_index", default=1, minimum=0)
    last, every = _last_layer(fields, config.num_layers), fields.integer("moe_layer_interval", default=1)
    layers = tuple(first <= layer <= last and (layer + 1) % every == 0 for layer in range(config.num_layers))
    shared = size * fields.integer("moe_num_shared_experts", default=2, minimum=0, maximum=MAX_EXPERTS)
    return replace(config, mixture=MixtureConfig(routing, size, layers, shared))


def _last_layer(fields: Fields, num_layers: int) -> int:
    """The last layer with experts; -1 in a config is that of the model."""
    last = fields.integer("moe_layer_end_index", default=-1, minimum=-1)
    return num_layers - 1 if last < 0 else last


def compose_moe(config: ModelConfig, source: WeightSource) -> Network:
    """Biases are those of all products, the head's among them."""
    experts = functools.partial(read_experts, names=NAMES)
    return llama.compose(config, source, experts, head_bias=config.mlp_bias)

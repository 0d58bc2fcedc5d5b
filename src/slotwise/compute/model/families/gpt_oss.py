"""gpt-oss (OpenAI, 2025): experts with biases and a clamped activation, a sink for each head, a window in every second
layer.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import ClampedSwiGLU, Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import SPLIT, MixtureOfExperts, interleaved_experts, separate_experts
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mixture,
    read_window,
)
from slotwise.compute.model.network import Network

DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=64, norm_eps=1e-5, rope_theta=150_000.0)
ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def configure(fields: Fields) -> ModelConfig:
    if not fields.has("rope_parameters") and not fields.section("rope_scaling").values:
        fields = Fields({**fields.values, "rope_parameters": ROPE}, fields.where)
    config, bias = read_common(fields, DEFAULTS), fields.flag("attention_bias", default=True)
    num_layers = config.num_layers
    activation = ClampedSwiGLU(fields.number("swiglu_alpha", default=1.702), fields.number("swiglu_limit", default=7.0))
    mixture = read_mixture(fields, config, Routing(128, 4, is_normalized=True))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=read_layer_types(fields, read_window(fields, 128), ((SLIDING, FULL) * num_layers)[:num_layers]),
        mixture=replace(mixture, activation=activation),
    )


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, experts, AttentionOptions(sinks="sinks"))


def experts(config: ModelConfig, source: WeightSource, at: str) -> MixtureOfExperts:
    mixture, name = config.mixture_of_experts, f"{at}.mlp"
    sizes, routing = (config.hidden_size, mixture.intermediate_size), mixture.routing
    router = Linear(source, {f"{name}.router": routing.num_experts}, config.hidden_size, bias=True, is_exact=True)
    at, count = f"{name}.experts", routing.num_experts
    weights = (separate_experts(source, at, SPLIT, sizes, count, bias=True) if mixture.are_split else
               interleaved_experts(source, at, sizes, count))
    return MixtureOfExperts(router, weights, sizes, routing, source, activation=mixture.activation)

"""Phi-3.5-MoE (Microsoft, 2024): Llama with LayerNorms, biases, and two experts of each token, whose shares are
softmaxes over logits that are nearly as large (Liu et al., "GRIN", 2024).
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import mistral
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_head_dim,
    read_rope,
    read_routing,
    read_window,
)
from slotwise.compute.model.network import Network, read_experts, read_network

CHOSEN = 2  # experts of a token, whatever the model
DEFAULTS = ConfigDefaults(num_kv_heads=8, norm_eps=1e-5, rope_theta=1_000_000.0)


def configure(fields: Fields) -> ModelConfig:
    fields = _with_factor(fields)
    rope = read_rope(fields, DEFAULTS.rope_theta, head_dim=read_head_dim(fields))
    num_layers, bias = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.flag("attention_bias")
    config = read_common(fields, DEFAULTS, ropes=(rope,) * num_layers)
    jitter = fields.number("router_jitter_noise", default=0.01, minimum=-1e-30)
    routing = read_routing(fields, Routing(16, CHOSEN, is_normalized=False, scoring="sparse_mixer", jitter=jitter))
    if routing.top_k != CHOSEN:
        raise fields.error("num_experts_per_tok", f"must be {CHOSEN}, not {routing.top_k}")
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        windows=(read_window(fields, 0),) * num_layers,
        mixture=MixtureConfig(routing, config.intermediate_size, (True,) * num_layers),
        own=fields.flag("lm_head_bias"),
    )


def _with_factor(fields: Fields) -> Fields:
    """The factor of sines and cosines under its usual name: of contexts of either length, which must be the same."""
    name = "rope_scaling" if fields.section("rope_scaling").values else "rope_parameters"
    rope = fields.section(name)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return fields
    if kind != "longrope":
        raise fields.error(name, f"type {kind!r:.40} is not supported; these are: default, longrope")
    short, long = rope.number("short_mscale"), rope.number("long_mscale")
    if short != long:
        raise rope.error("long_mscale", f"({long:g}) must be short_mscale ({short:g})")
    return Fields({**fields.values, name: {**rope.values, "attention_factor": short}}, fields.where)


class PhimoeLayer(LlamaLayer):
    """Llama's layer with LayerNorms."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, LayerNormOptions(config.norm_eps)
        options = AttentionOptions(config.qkv_bias, config.output_bias)
        self.attention_norm = norms.read(source, f"{at}.input_layernorm", hidden)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm = norms.read(source, f"{at}.post_attention_layernorm", hidden)
        self.mlp = read_experts(config, source, at, mistral.EXPERTS)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer = functools.partial(PhimoeLayer, config, source)
    ends = EndOptions(config.tie_word_embeddings, head_bias=config.own is True)
    return read_network(config, source, layer, ends, LayerNormOptions(config.norm_eps))

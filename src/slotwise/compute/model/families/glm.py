"""GLM-4 (Team GLM, 2024): Llama that rotates half of a head, in pairs of neighbors; since 0414 with norms behind
attention and MLP, too.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.source import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_head_dim,
    read_rope,
)
from slotwise.compute.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(num_kv_heads=2, head_dim=128, norm_eps=0.00000015625)


def configure(fields: Fields) -> ModelConfig:
    fields = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
    head_dim = read_head_dim(fields) if fields.has("head_dim") else DEFAULTS.head_dim
    rope = replace(read_rope(fields, head_dim=head_dim), has_neighbors=True)
    config = read_common(fields, DEFAULTS, ropes=(rope,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    return replace(config, qkv_bias=fields.flag("attention_bias", default=True), has_fused_gates=True)


class Glm4Layer(DecoderLayer):
    """The layer of the version of 0414."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        options = AttentionOptions(config.qkv_bias)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention_post_norm = RMSNorm(source, f"{at}.post_self_attn_layernorm", hidden, norms)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size), is_fused=True)
        self.mlp_post_norm = RMSNorm(source, f"{at}.post_mlp_layernorm", hidden, norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(self.attention_norm(h), step))
        h += self.mlp_post_norm(self.mlp(self.mlp_norm(h)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """The version of 0414."""
    layer, ends = functools.partial(Glm4Layer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

"""GLM-4 (Team GLM, 2024): Llama that rotates half of a head, in pairs of neighbors; since 0414 with norms behind
attention and MLP, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from slotwise.compute.model.families.llama import ReadExperts
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import PLAIN, Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_head_dim,
    read_rope,
)
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network

NORMS = "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
DEFAULTS = ConfigDefaults(num_kv_heads=2, head_dim=128, norm_eps=0.00000015625)


def configure(fields: Fields) -> ModelConfig:
    fields = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
    head_dim = read_head_dim(fields) if fields.has("head_dim") else DEFAULTS.head_dim
    rope = replace(read_rope(fields, head_dim=head_dim), has_neighbors=True)
    config = read_common(fields, DEFAULTS, ropes=(rope,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    return replace(config, qkv_bias=fields.flag("attention_bias", default=True), has_fused_gates=True)


class Glm4Layer(DecoderLayer):
    """The layer of the version of 0414, and of others with norms before and behind attention and MLP.

    Args:
        names: of the norms behind attention, before the MLP, and behind it.
        experts: reads the experts of the layer with a given name, in place of an MLP.
        options: of its attention, in addition to those of the config.
    """

    live_states = 4

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, names: Sequence[str] = NORMS,
        experts: ReadExperts | None = None, options: AttentionOptions = PLAIN,
    ) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        options = replace(options, qkv_bias=config.qkv_bias, output_bias=config.output_bias,
                          qk_norm=norms if config.qk_norm else None)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention_post_norm = RMSNorm(source, f"{at}.{names[0]}", hidden, norms)
        self.mlp_norm = RMSNorm(source, f"{at}.{names[1]}", hidden, norms)
        self.mlp: MLP = experts(config, source, at) if experts and config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size), is_fused=config.has_fused_gates)
        self.mlp_post_norm = RMSNorm(source, f"{at}.{names[2]}", hidden, norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(self.attention_norm(h), step))
        h += self.mlp_post_norm(self.mlp(self.mlp_norm(h)))


def compose(
    config: ModelConfig, source: WeightSource, names: Sequence[str] = NORMS, experts: ReadExperts | None = None,
    options: AttentionOptions = PLAIN,
) -> Network:
    """A model of `Glm4Layer`s with these options."""
    layer = functools.partial(Glm4Layer, config, source, names=names, experts=experts, options=options)
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

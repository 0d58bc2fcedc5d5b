"""OLMo 2 (OLMo Team, 2024): norms after attention and MLP, not before them, and over all queries and keys.

    h += norm(attention(h)),  h += norm(down(silu(gate(h)) * up(h)))

OLMo 3 (OLMo Team, 2025) has a window in three of four layers, whose rotary embedding is not scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from slotwise.compute.model.families.llama import ReadExperts
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NoNorm, NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_ropes,
    read_window,
)
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network


def configure(fields: Fields, ropes: Sequence[Rope] | None = None) -> ModelConfig:
    """`ropes` are those of the layers; None: one for all of them."""
    config, bias = read_common(fields, ConfigDefaults(norm_eps=1e-5), ropes=ropes), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True)


class Olmo2Layer(DecoderLayer):
    """Also OLMo 3's, with windows and rotary embeddings by layer, EXAONE 4's, and FlexOlmo's.

    Args:
        norms_all_heads: see `AttentionOptions`.
        experts: reads the experts of the layer with a given name, in place of an MLP.
    """

    live_states = 4

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, experts: ReadExperts | None = None, *,
        norms_all_heads: bool,
    ) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        options = AttentionOptions(config.qkv_bias, config.output_bias, norms, norms_all_heads)
        self.attention_norm = NoNorm()
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention_post_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp: MLP = experts(config, source, at) if experts and config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size))
        self.mlp_post_norm = RMSNorm(source, f"{at}.post_feedforward_layernorm", hidden, norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(h.sum(), step))
        h += self.mlp_post_norm(self.mlp(h.sum()))


def compose(
    config: ModelConfig, source: WeightSource, experts: ReadExperts | None = None, *, norms_all_heads: bool = True,
) -> Network:
    """A model of `Olmo2Layer`s."""
    layer = functools.partial(Olmo2Layer, config, source, experts=experts, norms_all_heads=norms_all_heads)
    return read_network(
        config, source, layer, EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps))


OLMO3_THETA = 500_000.0


def configure_olmo3(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers))
    windows = read_layer_types(fields, read_window(fields), kinds)
    ropes = read_ropes(fields, {FULL: fields.number("rope_theta", default=OLMO3_THETA), SLIDING: OLMO3_THETA})
    return replace(configure(fields, [ropes[kind] for kind in kinds]), windows=windows)

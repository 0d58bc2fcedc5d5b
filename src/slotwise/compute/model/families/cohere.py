"""Command R (Cohere, 2024): attention and MLP read the same LayerNorm without a bias, and neighbors rotate.

    h += attention(norm(h)) + down(silu(gate(norm(h))) * up(norm(h)))

Command R7B and A (Cohere 2, 2024) have a window in three of four layers, and no positions in the fourth.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import HeadNormOptions, LayerNormOptions, ResidualStream
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.layers.source import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_window,
)
from slotwise.compute.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)


def configure(fields: Fields, defaults: ConfigDefaults = DEFAULTS) -> ModelConfig:
    fields = fields.renamed({"layer_norm_eps": "rms_norm_eps"})
    config, bias = read_common(fields, defaults), fields.flag("attention_bias")
    return replace(
        config, ropes=tuple(replace(rope, has_neighbors=True) for rope in config.ropes), qkv_bias=bias,
        output_bias=bias, qk_norm=fields.flag("use_qk_norm"),
        logit_scale=fields.number("logit_scale", default=0.0625), is_parallel=True)


def configure_cohere2(fields: Fields) -> ModelConfig:
    config = configure(fields, replace(DEFAULTS, rope_theta=10_000.0))
    every = fields.integer("sliding_window_pattern", default=4)
    kinds = [SLIDING if (layer + 1) % every else FULL for layer in range(config.num_layers)]
    windows = read_layer_types(fields, read_window(fields), kinds)
    ropes = tuple(rope if window else NoRope() for rope, window in zip(config.ropes, windows, strict=True))
    return replace(config, windows=windows, ropes=ropes, qk_norm=False)


class CohereLayer(DecoderLayer):
    """Attention and MLP read the same norm."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, eps = f"model.layers.{index}", config.hidden_size, config.norm_eps
        heads = HeadNormOptions(eps, ("q_norm", "k_norm"), stored="stacked") if config.qk_norm else None
        self.attention_norm = LayerNormOptions(eps, has_bias=False).read(source, f"{at}.input_layernorm", hidden)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias, head_norm=heads))
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x = self.attention_norm(h)
        h += self.attention(x, step)
        h += self.mlp(step.kept(x))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """Also Cohere 2's."""
    ends = EndOptions(config.tie_word_embeddings, logit_scale=config.logit_scale)
    layer = functools.partial(CohereLayer, config, source)
    return read_network(config, source, layer, ends, LayerNormOptions(config.norm_eps, has_bias=False))

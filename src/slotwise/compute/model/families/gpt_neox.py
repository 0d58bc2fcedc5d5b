"""GPT-NeoX (Black et al., 2022) and Pythia (Biderman et al., 2023): attention and MLP read the same hidden states, each
through a norm of its own; queries, keys and values are one weight, head by head; a quarter of a head rotates.

    h += attention(norm(h)) + down(gelu(up(norm(h))))

GPT-NeoX-Japanese (ABEJA, 2022) adds one after the other, and has a bias behind the attention of the last layer alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, compose_layers, read_plain
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions, LayerStep
from slotwise.compute.model.layers.norm import LayerNormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_head_dim, read_rope
from slotwise.compute.model.network import Network

DEFAULTS = ConfigDefaults(norm_eps=1e-5)
PARTS = Parts("input_layernorm", "attention", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_partial(fields, 0.25, "gelu"), fields.flag("attention_bias", default=True)
    return replace(
        config, is_parallel=fields.flag("use_parallel_residual", default=True), qkv_bias=bias, output_bias=bias)


def read_partial(
    fields: Fields, share: float, activation: str, defaults: ConfigDefaults = DEFAULTS,
) -> ModelConfig:
    """A config with LayerNorms, MLPs of two products, and heads of which `share` rotates; also other families'.

    `share` and `activation` are what a config means that names none.
    """
    fields = fields.renamed({
        "layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    fields = fields.with_defaults(partial_rotary_factor=share)
    rope = read_rope(fields, defaults.rope_theta, head_dim=read_head_dim(fields))
    return read_plain(fields, defaults, activation, rope=rope)


class ParallelLayer(ClassicLayer):
    """Attention and MLP read the same hidden states, each through a norm of its own."""

    live_states = 4

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x, of_mlp = self.attention_norm(h), self.mlp_norm(h)
        h += self.attention(x, step)
        h += self.mlp(step.kept(of_mlp))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    kind = ParallelLayer if config.is_parallel else ClassicLayer
    return compose_layers(config, source, kind, PARTS, interleaved(config))


def interleaved(config: ModelConfig, **more: Any) -> AttentionOptions:
    """Queries, keys and values are one weight, head by head; also other families', with `more` options."""
    return AttentionOptions(
        config.qkv_bias, config.output_bias, names=("", "", "", "dense"), qkv_name="query_key_value",
        qkv_groups=1 if config.has_ordered_qkv else config.num_heads, **more)


def configure_japanese(fields: Fields) -> ModelConfig:
    """The size of an MLP is a multiple of the hidden size."""
    times = fields.integer("intermediate_multiple_size", default=4)
    fields = fields.with_defaults(intermediate_size=times * fields.integer("hidden_size"))
    config = read_partial(fields, 1.0, "gelu", ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True))
    return replace(config, qkv_bias=False, output_bias=False, mlp_bias=False)


class JapaneseLayer(ClassicLayer):
    """The last layer alone has a bias behind attention."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, options: AttentionOptions, norms: LayerNormOptions,
        parts: Parts,
    ) -> None:
        options = replace(options, output_bias=index == config.num_layers - 1)
        super().__init__(config, source, index, options, norms, parts)


def compose_japanese(config: ModelConfig, source: WeightSource) -> Network:
    return compose_layers(config, source, JapaneseLayer, PARTS, interleaved(config))

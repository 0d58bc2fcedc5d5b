"""Arcee's foundation model (2025): Llama with MLPs of two products and squared ReLU.

Jais 2 (Inception, 2025) has LayerNorms and biases as well.  NanoChat (Karpathy, 2025) has norms without weights, also
of the embedding, of queries and of keys, and rotates backwards.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families.gpt2 import read_plain
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import PlainMLP
from slotwise.compute.model.layers.norm import LayerNormOptions, Norm, NormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import BackwardRope
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_head_dim, read_rope
from slotwise.compute.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5)
UP, DOWN = "up_proj", "down_proj"


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    config = read_plain(fields, DEFAULTS, "relu2", rope=read_rope(fields))
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def configure_jais2(fields: Fields) -> ModelConfig:
    fields = fields.renamed({"layer_norm_eps": "rms_norm_eps"}).with_defaults(attention_bias=True, mlp_bias=True)
    return configure(fields)


def configure_nanochat(fields: Fields) -> ModelConfig:
    read_head_dim(fields)
    config, bias = read_plain(fields, ConfigDefaults(), "relu2", rope=read_rope(fields)), fields.flag("attention_bias")
    cap = 0.0 if fields.is_null("final_logit_softcapping") else fields.number("final_logit_softcapping", default=15.0)
    ropes = tuple(BackwardRope(rope.theta, rope) for rope in config.ropes)
    return replace(
        config, ropes=ropes, qkv_bias=bias, output_bias=bias, mlp_bias=False, logit_soft_cap=cap)


class PlainMLPLayer(DecoderLayer):
    """Llama's layer with an MLP of two products, and any norms.

    Args:
        names: of the MLP's products.
    """

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, norms: NormOptions | LayerNormOptions,
        options: AttentionOptions, names: tuple[str, str] = (UP, DOWN),
    ) -> None:
        at, hidden = f"model.layers.{index}", config.hidden_size
        self.attention_norm: Norm = norms.read(source, f"{at}.input_layernorm", hidden)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm: Norm = norms.read(source, f"{at}.post_attention_layernorm", hidden)
        self.mlp = PlainMLP(source, f"{at}.mlp", names, (hidden, config.intermediate_size),
                            activation=config.activation, bias=config.mlp_bias)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return _compose(config, source, NormOptions(config.norm_eps))


def compose_jais2(config: ModelConfig, source: WeightSource) -> Network:
    return _compose(config, source, LayerNormOptions(config.norm_eps))


def _compose(config: ModelConfig, source: WeightSource, norms: NormOptions | LayerNormOptions) -> Network:
    options = AttentionOptions(config.qkv_bias, config.output_bias)
    layer = functools.partial(PlainMLPLayer, config, source, norms=norms, options=options)
    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings), norms)


def compose_nanochat(config: ModelConfig, source: WeightSource) -> Network:
    norms = NormOptions(config.norm_eps, has_weight=False)
    options = AttentionOptions(config.qkv_bias, config.output_bias, norms)
    layer = functools.partial(PlainMLPLayer, config, source, norms=norms, options=options, names=("fc1", "fc2"))
    ends = EndOptions(config.tie_word_embeddings, soft_cap=config.logit_soft_cap, norm=norms)
    return read_network(config, source, layer, ends, norms)

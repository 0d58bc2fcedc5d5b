"""GPT-2 (Radford et al., 2019), and what shares its shape: positions from a table, LayerNorms with biases, MLPs of two
products.

    h = embedding(tokens) + positions
    h += attention(norm(h)),  h += down(gelu(up(norm(h))))

GPTBigCode (Li et al., "StarCoder", 2023) has one head of keys and values.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions, learned_positions
from slotwise.compute.model.layers.mlp import GatedMLP, PlainMLP
from slotwise.compute.model.layers.norm import LayerNormOptions, Norm, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope, Rope
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_activation,
    read_common,
)
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network

NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "layer_norm_epsilon": "rms_norm_eps"}
DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
NO_ROPE = NoRope()
TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def configure(fields: Fields) -> ModelConfig:
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        raise fields.error("scale_attn_by_inverse_layer_idx", "is true, which is not supported")
    return read_gpt2(fields, "gelu_new")


def read_gpt2(fields: Fields, activation: str) -> ModelConfig:
    """A config under the names of GPT-2, also GPTBigCode's; `activation` is the default."""
    fields = with_inner(fields.renamed(NAMES))
    if fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "is true: only decoders are supported")
    config = read_plain(fields, DEFAULTS, activation, "activation_function")
    return replace(config, attention_scale=0.0 if fields.flag("scale_attn_weights", default=True) else 1.0)


def with_inner(fields: Fields) -> Fields:
    """Fields with `intermediate_size`, which is four times the hidden size where a config names none."""
    return fields.with_defaults(intermediate_size=4 * fields.integer("hidden_size"))


def read_plain(
    fields: Fields, defaults: ConfigDefaults, activation: str, name: str = "hidden_act", rope: Rope = NO_ROPE,
) -> ModelConfig:
    """A decoder with MLPs of two products and biases everywhere; also other families'.

    `name` is that of the field with the activation, `activation` the default.
    """
    ropes = (rope,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return replace(
        read_common(fields, defaults, (), ropes), qkv_bias=True, output_bias=True, mlp_bias=True, has_gated_mlp=False,
        activation=read_activation(fields, activation, name))


class Parts(NamedTuple):
    """The names of a layer's parts in the checkpoint."""

    attention_norm: str
    attention: str
    mlp_norm: str  # "": attention and MLP run in parallel, from one norm
    up: str = ""
    down: str = ""


class ClassicLayer(DecoderLayer):
    """A layer with LayerNorms, and an MLP of two products unless the config says otherwise; also other families'."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, options: AttentionOptions, norms: LayerNormOptions,
        parts: Parts,
    ) -> None:
        at, hidden = f"model.layers.{index}", config.hidden_size
        self.attention_norm: Norm = norms.read(source, f"{at}.{parts.attention_norm}", hidden)
        self.attention = Attention(
            source, f"{at}.{parts.attention}", config.attention_shape(index), config.ropes[index], hidden, options)
        if parts.mlp_norm:
            self.mlp_norm: Norm = norms.read(source, f"{at}.{parts.mlp_norm}", hidden)
        sizes, activation = (hidden, config.intermediate_size), config.activation
        self.mlp: MLP = GatedMLP(
            source, f"{at}.mlp", sizes, activation=activation, bias=config.mlp_bias,
        ) if config.has_gated_mlp else PlainMLP(
            source, at, (parts.up, parts.down), sizes, activation=activation, bias=config.mlp_bias)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


PARTS = Parts("ln_1", "attn", "ln_2", "mlp.c_fc", "mlp.c_proj")


def compose(config: ModelConfig, source: WeightSource, **more: Any) -> Network:
    """Also GPTBigCode's, with `more` options of attention."""
    options = AttentionOptions(True, True, qkv_name="c_attn", names=("", "", "", "c_proj"), **more)
    return compose_layers(config, source, ClassicLayer, PARTS, options, table_ends(config))


def compose_layers(
    config: ModelConfig, source: WeightSource, kind: type[ClassicLayer], parts: Parts, options: AttentionOptions,
    ends: EndOptions | None = None, norms: LayerNormOptions | None = None,
) -> Network:
    """A model of layers of this kind; also other families'."""
    norms = norms or LayerNormOptions(config.norm_eps)
    layer = functools.partial(kind, config, source, options=options, norms=norms, parts=parts)
    return read_network(config, source, layer, ends or EndOptions(config.tie_word_embeddings), norms)


def table_ends(config: ModelConfig, offset: int = 0) -> EndOptions:
    """An embedding with a table of positions, which begins with `offset` rows that no position has."""
    positions = functools.partial(
        learned_positions, count=config.max_position_embeddings, hidden_size=config.hidden_size, offset=offset)
    return EndOptions(config.tie_word_embeddings, config.embedding_scale, positions=positions)


def configure_bigcode(fields: Fields) -> ModelConfig:
    config = read_gpt2(fields.replaced(num_key_value_heads=None), "gelu_pytorch_tanh")
    return replace(config, num_kv_heads=1 if fields.flag("multi_query", default=True) else config.num_heads)


def compose_bigcode(config: ModelConfig, source: WeightSource) -> Network:
    """With a head of keys and values for each head of queries, the three of a head are neighbors."""
    return compose(config, source, qkv_groups=config.num_kv_heads)

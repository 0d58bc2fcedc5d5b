"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Llama with Mamba-2's layer in place of attention in most layers, and
attention that rotates half of a head in the others.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import StateSpaceShape
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.families.mamba2 import read_groups, read_step_limit
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba2 import Mamba2
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    LINEAR,
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_head_dim,
    read_rope,
    read_state_layers,
)
from slotwise.compute.model.network import MLP, Network, TokenMixer, read_network


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    full = fields.integers("attn_layer_indices") if fields.has("attn_layer_indices") else ()
    states = read_state_layers(Fields({"num_hidden_layers": num_layers}, fields.where), [
        FULL if layer in full else LINEAR for layer in range(num_layers)])
    turned = Fields({**fields.values, "partial_rotary_factor": 0.5}, fields.where)
    rope, bias = read_rope(turned, head_dim=read_head_dim(fields)), fields.flag("attention_bias")
    config = read_common(
        fields, ConfigDefaults(num_kv_heads=8, norm_eps=1e-5), ropes=(rope,) * num_layers)
    return replace(
        config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"),
        recurrent=read_recurrent(fields, config, states))


def read_recurrent(fields: Fields, config: ModelConfig, states: tuple[bool, ...]) -> RecurrentConfig:
    """Mamba-2's layers under the names of hybrids; `states` are the layers that have them."""
    heads = fields.integer("mamba_n_heads", default=128, maximum=1 << 16)
    values = int(fields.number("mamba_expand", default=2.0) * config.hidden_size)
    head_dim = values // heads
    if fields.values.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head", maximum=1 << 12)
    if heads * head_dim != values:
        raise fields.error("mamba_n_heads", f"({heads}) times mamba_d_head ({head_dim}) must be mamba_d_ssm, or "
                           f"mamba_expand times hidden_size ({values})")
    groups = read_groups(fields, "mamba_n_groups", heads)
    least, largest = read_step_limit(fields)
    shape = StateSpaceShape(
        heads, head_dim, groups, fields.integer("mamba_d_state", default=256, maximum=1 << 12),
        fields.integer("mamba_d_conv", default=4, maximum=64), groups, least_step=least, largest_step=largest)
    return RecurrentConfig(shape, states, has_bias=fields.flag("mamba_proj_bias"),
                           has_convolution_bias=fields.flag("mamba_conv_bias", default=True))


def read_mixer(
    config: ModelConfig, source: WeightSource, index: int, options: AttentionOptions,
) -> TokenMixer:
    """The layer with a state, or the attention, of layer `index`; also other hybrids'."""
    at, recurrent, hidden = f"model.layers.{index}", config.recurrent, config.hidden_size
    if recurrent is None or not recurrent.layers[index]:
        return Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
    assert isinstance(recurrent.shape, StateSpaceShape)
    return Mamba2(source, f"{at}.mamba", recurrent.shape, hidden, recurrent.eps or config.norm_eps,
                  bias=recurrent.has_bias, convolution_bias=recurrent.has_convolution_bias)


class BambaLayer(LlamaLayer):
    """Llama's layer under other names."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = read_mixer(config, source, index, AttentionOptions(config.qkv_bias, config.output_bias))
        self.mlp_norm = RMSNorm(source, f"{at}.pre_ff_layernorm", hidden, norms)
        self.mlp: MLP = GatedMLP(
            source, f"{at}.feed_forward", (hidden, config.intermediate_size), bias=config.mlp_bias)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends, norms = EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps)
    return read_network(
        config, source, functools.partial(BambaLayer, config, source), ends, norms)

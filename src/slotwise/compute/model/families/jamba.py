"""Jamba (AI21, 2024): Mamba's layer with norms of dt, B and C in place of attention in most layers, attention without
positions in the others, and experts in every second layer.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing, SelectiveShape
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.families.mamba import read_rank
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba import Mamba
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_mixture,
)
from slotwise.compute.model.network import MLP, ExpertNames, Network, TokenMixer, read_experts, read_network

NAMES = ExpertNames("feed_forward.router", "feed_forward.experts")


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    config = read_common(fields, ConfigDefaults(num_kv_heads=8), ropes=(NoRope(),) * num_layers)
    hidden = config.hidden_size
    shape = SelectiveShape(
        int(fields.number("mamba_expand", default=2.0) * hidden),
        fields.integer("mamba_d_state", default=16, maximum=1 << 12),
        fields.integer("mamba_d_conv", default=4, minimum=2, maximum=64), read_rank(fields, "mamba_dt_rank", hidden))
    full, sparse = _read_every(fields, "attn_layer", num_layers, 8, 4), _read_every(
        fields, "expert_layer", num_layers, 2, 1)
    config = replace(config, recurrent=RecurrentConfig(
        shape, tuple(not each for each in full), has_bias=fields.flag("mamba_proj_bias"),
        has_convolution_bias=fields.flag("mamba_conv_bias", default=True)))
    if fields.integer("num_experts", default=16) == 1:
        return config
    mixture = read_mixture(fields, config, Routing(16, 2, is_normalized=False))
    return replace(config, mixture=replace(mixture, layers=sparse))


def _read_every(fields: Fields, name: str, num_layers: int, period: int, offset: int) -> tuple[bool, ...]:
    """Layers `offset`, `offset + period` and so on.  Raises CheckpointError for an offset of a period or more."""
    every = fields.integer(f"{name}_period", default=period)
    first = fields.integer(f"{name}_offset", default=offset, minimum=0)
    if first >= every:
        raise fields.error(f"{name}_offset", f"({first}) must be less than {name}_period ({every})")
    return tuple(layer % every == first for layer in range(num_layers))


class JambaLayer(LlamaLayer):
    """Llama's layer under other names."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        recurrent = config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, SelectiveShape)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Mamba(
            source, f"{at}.mamba", recurrent.shape, hidden, bias=recurrent.has_bias,
            convolution_bias=recurrent.has_convolution_bias,
            norm=lambda source, name, size: RMSNorm(source, name, size, norms),
        ) if recurrent.layers[index] else Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden)
        self.mlp_norm = RMSNorm(source, f"{at}.pre_ff_layernorm", hidden, norms)
        self.mlp: MLP = read_experts(config, source, at, NAMES) if config.has_experts(index) else GatedMLP(
            source, f"{at}.feed_forward", (hidden, config.intermediate_size))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends, norms = EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps)
    return read_network(
        config, source, functools.partial(JambaLayer, config, source), ends, norms)

"""Qwen3-Next (Qwen Team, 2025): in three of four layers a recurrent state by the gated delta rule, in the fourth gated
attention that rotates a quarter of a head; experts, of which all tokens share one, in every layer.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import DeltaShape, Routing
from slotwise.compute.model.families import qwen2
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.gated_delta import GatedDelta
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
    read_mixture,
    read_rope,
    read_state_layers,
)
from slotwise.compute.model.network import Network, TokenMixer, read_network

HEAD_DIM = 256


def configure(fields: Fields) -> ModelConfig:
    config = read_hybrid(fields, ConfigDefaults(num_kv_heads=2, head_dim=HEAD_DIM), is_interleaved=True)
    routing = Routing(512, 10, is_normalized=fields.flag("norm_topk_prob", default=True))
    mixture = read_mixture(fields, config, routing, intermediate_size=512)
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    return replace(config, mixture=replace(mixture, shared_intermediate_size=shared))


def read_hybrid(fields: Fields, defaults: ConfigDefaults, *, is_interleaved: bool) -> ModelConfig:
    """All of a config but its MLPs; also Qwen3.5's."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    turned = Fields({"partial_rotary_factor": 0.25, **fields.values}, fields.where)
    rope = read_rope(turned, head_dim=fields.integer("head_dim", default=HEAD_DIM))
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, defaults, ropes=(rope,) * num_layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        has_gated_attention=True,
        recurrent=RecurrentConfig(_read_shape(fields), _read_kinds(fields, num_layers), is_interleaved=is_interleaved),
    )


def _read_shape(fields: Fields) -> DeltaShape:
    keys = fields.integer("linear_num_key_heads", default=16, maximum=1 << 12)
    values = fields.integer("linear_num_value_heads", default=32, maximum=1 << 12)
    if values % keys:
        raise fields.error("linear_num_value_heads", f"({values}) must be a multiple of linear_num_key_heads ({keys})")
    return DeltaShape(
        keys, values, fields.integer("linear_key_head_dim", default=128, maximum=1 << 12),
        fields.integer("linear_value_head_dim", default=128, maximum=1 << 12),
        fields.integer("linear_conv_kernel_dim", default=4, maximum=64))


def _read_kinds(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a recurrent state."""
    every = fields.integer("full_attention_interval", default=4)
    kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(num_layers)]
    states = read_state_layers(fields, kinds)
    if all(states):
        raise fields.error("layer_types", "has no layer with full attention, which is not supported")
    return states


class Qwen3NextLayer(LlamaLayer):
    """Llama's layer with a recurrent state in place of attention in most layers; also Qwen3.5's."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, recurrent = f"model.layers.{index}", config.hidden_size, _norms(config), config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, DeltaShape)
        options = AttentionOptions(config.qkv_bias, config.output_bias, norms, is_gated=True)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = GatedDelta(
            source, f"{at}.linear_attn", recurrent.shape, hidden, config.norm_eps,
            is_interleaved=recurrent.is_interleaved, has_ordered_mixed=config.has_ordered_qkv,
            has_tiled_values=recurrent.has_tiled_values,
        ) if recurrent.layers[index] else Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = qwen2.experts(config, source, at) if config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """Also Qwen3.5's, with and without experts."""
    layer = functools.partial(Qwen3NextLayer, config, source)
    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings), _norms(config))


def _norms(config: ModelConfig) -> NormOptions:
    return NormOptions(config.norm_eps, offset=1.0)

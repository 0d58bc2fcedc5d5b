"""OLMo (Groeneveld et al., 2024): Llama with LayerNorms without weights; queries, keys and values may be clipped."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, compose_layers
from slotwise.compute.model.families.llama import clipped
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_activation, read_common
from slotwise.compute.model.network import Network

PARTS = Parts("input_layernorm", "self_attn", "post_attention_layernorm")
EPS = 1e-5


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, ConfigDefaults(norm_eps=EPS), ()), fields.flag("attention_bias")
    clip = fields.number("clip_qkv") if fields.has("clip_qkv") else 0.0
    return replace(config, norm_eps=EPS, qkv_bias=bias, output_bias=bias, qkv_clip=clip,
                   activation=read_activation(fields, "silu"))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(config.qkv_bias, config.output_bias, qkv=clipped(config.qkv_clip))
    norms = LayerNormOptions(config.norm_eps, has_weight=False, has_bias=False)
    return compose_layers(config, source, ClassicLayer, PARTS, options, norms=norms)

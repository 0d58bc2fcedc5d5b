"""Nemotron (Parmar et al., 2024): LayerNorms whose weights have 1 added, squared ReLU, and half of a head rotates."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, compose_layers
from slotwise.compute.model.families.gpt_neox import read_partial
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network

PARTS = Parts("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.up_proj", "mlp.down_proj")


def configure(fields: Fields) -> ModelConfig:
    config = read_partial(fields.renamed({"norm_eps": "rms_norm_eps"}), 0.5, "relu2")
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(config.qkv_bias, config.output_bias)
    return compose_layers(
        config, source, ClassicLayer, PARTS, options, norms=LayerNormOptions(config.norm_eps, offset=1.0))

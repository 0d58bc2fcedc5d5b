"""Persimmon (Adept, 2023): GPT-NeoX with one sum after the other, squared ReLU, and queries and keys normed by head."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, compose_layers
from slotwise.compute.model.families.gpt_neox import PARTS, interleaved, read_partial
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.norm import HeadNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    return replace(read_partial(fields, 0.5, "relu2"), qk_norm=fields.flag("qk_layernorm", default=True))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    norms = HeadNormOptions(config.norm_eps, has_bias=True) if config.qk_norm else None
    parts = PARTS._replace(attention="self_attn")
    return compose_layers(config, source, ClassicLayer, parts, interleaved(config, head_norm=norms))

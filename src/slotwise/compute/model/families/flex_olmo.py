"""FlexOlmo (Shi et al., 2025): OLMo 2 with experts, each trained on data of its own."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import olmo2
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common, read_mixture
from slotwise.compute.model.network import ExpertNames, Network, read_experts


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, ConfigDefaults(rope_theta=500_000.0)), fields.flag("attention_bias")
    mixture = read_mixture(fields, config, Routing(7, 5, is_normalized=False))
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True, mixture=mixture)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return olmo2.compose(config, source, functools.partial(read_experts, names=ExpertNames()))

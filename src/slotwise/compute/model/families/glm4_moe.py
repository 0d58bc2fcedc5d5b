"""GLM-4.5 (GLM-4.5 Team, 2025): Llama that rotates half of a head, with DeepSeek-V3's experts behind its first layers.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_grouped_mixture,
    read_head_dim,
    read_rope,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames(correction="mlp.gate.e_score_correction_bias")  # also those of DeepSeek-V3


def configure(fields: Fields) -> ModelConfig:
    turned = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
    rope = read_rope(turned, head_dim=read_head_dim(fields))
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    config = read_common(fields, ConfigDefaults(num_kv_heads=8, norm_eps=1e-5), ropes=(rope,) * num_layers)
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("use_qk_norm"),
        mixture=read_grouped_mixture(fields, num_layers, Routing(128, 8, is_normalized=True), intermediate_size=1408),
    )


def compose(config: ModelConfig, source: WeightSource, names: ExpertNames = NAMES) -> Network:
    """A model of Llama's layers with experts under these names."""
    return llama.compose(config, source, functools.partial(read_experts, names=names))

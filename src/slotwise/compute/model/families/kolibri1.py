"""Kolibri 1 (2026): norms before and behind attention and MLP, windows in four of five layers, of which alone rotate,
and experts chosen by corrected logits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import glm
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERT_SIZE,
    SLIDING,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_layer_types,
    read_routing,
    read_window,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames(correction="moe.router.expert_bias")
NORMS = "post_attn_norm", "post_attention_layernorm", "post_ffn_norm"


def configure(fields: Fields) -> ModelConfig:
    """Every layer has experts, and the config no size of an MLP."""
    config = read_common(Fields({**fields.values, "intermediate_size": 1}, fields.where),
                         ConfigDefaults(num_kv_heads=4, head_dim=128))
    kinds = [SLIDING if (layer + 1) % 5 else FULL for layer in range(config.num_layers)]
    window = read_window(fields, 513)
    windows = read_layer_types(fields, window, kinds)
    routing = Routing(384, 6, fields.flag("norm_topk_prob"), "sigmoid", corrects_logits=True)
    mixture = MixtureConfig(
        read_routing(fields, routing),
        fields.integer("moe_intermediate_size", default=512, maximum=MAX_EXPERT_SIZE), (True,) * config.num_layers,
        fields.integer("shared_expert_intermediate_size", default=512, maximum=MAX_EXPERT_SIZE))
    ropes = tuple(config.ropes[0] if own or not window else NoRope() for own in windows)
    return replace(config, qk_norm=True, windows=windows, ropes=ropes, mixture=mixture)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return glm.compose(config, source, NORMS, functools.partial(read_experts, names=NAMES))

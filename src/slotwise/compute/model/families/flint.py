"""Flint (2026): norms of each head's query and key, a sink for each head, windows in most layers, of which alone
rotate, and experts chosen by sigmoid scores.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERT_SIZE,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mixture,
    read_window,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames(shared="mlp.shared_expert")
SINKS = AttentionOptions(sinks="softmax_offset")


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, ConfigDefaults(num_kv_heads=4, head_dim=128)), fields.flag("attention_bias")
    last = config.num_layers - 1
    kinds = [FULL if layer < 2 or layer % 4 == 1 or layer == last else SLIDING for layer in range(config.num_layers)]
    windows = read_layer_types(fields, read_window(fields, 513), kinds)
    of_experts = fields if fields.has("mlp_only_layers") else Fields(
        {**fields.values, "mlp_only_layers": [0, 1]}, fields.where)
    mixture = read_mixture(of_experts, config, Routing(256, 6, is_normalized=False), intermediate_size=512)
    routing = replace(mixture.routing, scoring="sigmoid", is_normalized=fields.flag("norm_topk_prob", default=True))
    shared = fields.integer("shared_expert_intermediate_size", default=1024, maximum=MAX_EXPERT_SIZE)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=windows,
        ropes=tuple(config.ropes[0] if own else NoRope() for own in windows),
        mixture=replace(mixture, routing=routing, shared_intermediate_size=shared),
    )


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=NAMES), SINKS)

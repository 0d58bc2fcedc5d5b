"""MiniMax-M2 (MiniMax, 2025): Llama that rotates a part of a head, with norms over all queries and all keys, and
experts chosen by sigmoid scores with a correction.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama, mistral
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_rope,
    read_routing,
)
from slotwise.compute.model.network import Network, read_experts

NAMES = mistral.EXPERTS._replace(correction="block_sparse_moe.e_score_correction_bias")
DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=128, rope_theta=5_000_000.0)


def configure(fields: Fields) -> ModelConfig:
    """`rotary_dim` is how the published checkpoints say which part of a head turns."""
    head_dim = fields.integer("head_dim", default=DEFAULTS.head_dim)
    if fields.has("rotary_dim"):
        share = fields.integer("rotary_dim", maximum=head_dim) / head_dim
        fields = Fields({"partial_rotary_factor": share, **fields.values}, fields.where)
    rope = read_rope(fields, DEFAULTS.rope_theta, head_dim=head_dim)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    config = read_common(fields, DEFAULTS, ropes=(rope,) * num_layers)
    routing = read_routing(fields, Routing(256, 8, is_normalized=True, scoring="sigmoid"))
    return replace(
        config, qk_norm=True, mixture=MixtureConfig(routing, config.intermediate_size, (True,) * num_layers))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    experts = functools.partial(read_experts, names=NAMES)
    return llama.compose(config, source, experts, AttentionOptions(norms_all_heads=True))

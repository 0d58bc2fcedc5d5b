"""Laguna (Poolside, 2026): norms of each head's query and key, another number of heads and another rotary embedding in
layers with windows, gates by softplus, and experts chosen by sigmoid scores with a correction.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERT_SIZE,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mlp_layers,
    read_ropes,
    read_routing,
    read_window,
    refuse_rope_scaling,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames(shared="mlp.shared_expert", correction="mlp.experts.e_score_correction_bias")
HEAD_DIM, PER_HEAD, PER_ELEMENT = 128, "per-head", "per-element"
ROPES = {FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
         SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}}


def configure(fields: Fields) -> ModelConfig:
    refuse_rope_scaling(fields)
    fields = fields.with_defaults(rope_parameters=ROPES, head_dim=HEAD_DIM)
    num_layers, bias = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.flag("attention_bias")
    kinds = fields.texts("layer_types") if fields.has("layer_types") else (FULL,) * num_layers
    windows = read_layer_types(fields, read_window(fields, 512), kinds)
    ropes = read_ropes(fields, {kind: float(str(rope["rope_theta"])) for kind, rope in ROPES.items()},
                       fields.integer("head_dim"))
    config = read_common(
        fields.replaced(rope_parameters=None), ConfigDefaults(num_kv_heads=8), ropes=[ropes[kind] for kind in kinds])
    for name in ("moe_router_logit_softcapping", "moe_apply_router_weight_on_input"):
        if fields.values.get(name):
            raise fields.error(name, f"is {fields.values[name]!r:.40}, which is not supported")
    routing = read_routing(fields, Routing(
        256, 8, is_normalized=True, scoring="sigmoid",
        scale=fields.number("moe_routed_scaling_factor", default=1.0)))
    size, shared = (fields.integer(name, default=512, maximum=MAX_EXPERT_SIZE)
                    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"))
    gating = PER_HEAD if fields.values.get("gating", True) is True else fields.text("gating")
    if gating not in (PER_HEAD, PER_ELEMENT):
        raise fields.error("gating", f"must be {PER_HEAD} or {PER_ELEMENT}, not {gating!r:.40}")
    heads = _read_heads(fields, config)
    return replace(
        config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows, query_heads=heads, own=gating,
        num_heads=max(heads, default=config.num_heads), has_gated_attention=True,
        mixture=MixtureConfig(routing, size, read_mlp_layers(fields, num_layers, 1), shared))


def _read_heads(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """The heads of queries of each layer; (): all have as many."""
    name = "num_attention_heads_per_layer"
    if not fields.has(name):
        return ()
    heads = fields.integers(name, maximum=1 << 12)
    if len(heads) != config.num_layers or any(not count or count % config.num_kv_heads for count in heads):
        raise fields.error(name, f"must be a multiple of {config.num_kv_heads} for each of {config.num_layers} layers")
    return () if set(heads) == {config.num_heads} else heads


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(
        is_gated=True, gate_name="g_proj", has_head_gates=config.own == PER_HEAD, has_softplus_gates=True)
    return llama.compose(config, source, functools.partial(read_experts, names=NAMES), options)

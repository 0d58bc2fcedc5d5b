"""Llama 4 (Meta, 2025), text: layers that rotate pairs of neighbors see chunks of the context, the others all of it and
no positions; norms without weights of queries and keys, and one expert of each token besides the one that all share.

Queries of layers without positions are scaled by the logarithm of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import QKNorm, Routing
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERT_SIZE,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_routing,
    text_part,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts, read_network

CHUNKED = "chunked_attention"  # of `layer_types`
NAMES = ExpertNames("feed_forward.router", "feed_forward.experts", are_transposed=True, stacked=(
    "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"), shared="feed_forward.shared_expert")
DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=500_000.0)
TEXT_DEFAULTS = {  # of a config for images and text, which may leave out what is as in the first such model
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 40, "max_position_embeddings": 131_072}


@dataclass(frozen=True, slots=True)
class Llama4Config:
    """What only these layers read."""

    has_norms: bool  # of queries and keys that rotate
    scale: float  # of the logarithm; 0: queries are not scaled
    floor: int  # positions that count as one


def configure(fields: Fields) -> ModelConfig:
    fields = fields if fields.has("intermediate_size") else Fields(
        {**fields.values, "intermediate_size": 8192}, fields.where)
    config, bias = read_common(fields, DEFAULTS), fields.flag("attention_bias")
    layers, size = range(config.num_layers), config.intermediate_size
    rotates = _rotates(fields, config.num_layers)
    chunk = 0 if fields.is_null("attention_chunk_size") else fields.integer("attention_chunk_size", default=8192)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else [
        CHUNKED if turns and chunk else FULL for turns in rotates]
    if set(kinds) - {FULL, CHUNKED} or (CHUNKED in kinds and not chunk):
        raise fields.error("layer_types", f"must be {FULL}, or {CHUNKED} with attention_chunk_size")
    every = fields.integer("interleave_moe_layer_step", default=1)
    with_experts = fields.integers("moe_layers") if fields.has("moe_layers") else layers[every - 1 :: every]
    rope = replace(config.ropes[0], has_neighbors=True)
    scale = fields.number("attn_scale", default=0.1) if fields.flag("attn_temperature_tuning", default=True) else 0.0
    routing = read_routing(fields, Routing(16, 1, is_normalized=False, scoring="sigmoid", scales_inputs=True))
    return replace(
        config,
        intermediate_size=fields.integer("intermediate_size_mlp", default=16_384, maximum=MAX_EXPERT_SIZE),
        qkv_bias=bias,
        output_bias=bias,
        windows=tuple(chunk if kind == CHUNKED else 0 for kind in kinds),
        has_chunks=True,
        ropes=tuple(rope if turns else NoRope() for turns in rotates),
        mixture=MixtureConfig(routing, size, tuple(layer in with_experts for layer in layers), size),
        own=Llama4Config(fields.flag("use_qk_norm", default=True), scale,
                         fields.integer("floor_scale", default=8192)),
    )


def _rotates(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer rotates: a 1 in `no_rope_layers`, of which an empty list says nothing."""
    flags = fields.integers("no_rope_layers", maximum=1) if fields.has("no_rope_layers") else ()
    if not flags:
        interval = fields.integer("no_rope_layer_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise fields.error("no_rope_layers", f"names {len(flags)} layers, num_hidden_layers {num_layers}")
    return [flag == 1 for flag in flags]


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text: prompts are text."""
    return configure(text_part(fields, TEXT_DEFAULTS))


class Llama4Layer(LlamaLayer):
    """Llama's layer with these options."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, own = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps), config.own
        assert isinstance(own, Llama4Config)
        options, rope = AttentionOptions(config.qkv_bias, config.output_bias), config.ropes[index]
        if isinstance(rope, NoRope):
            scaled = functools.partial(_scaled, own) if own.scale else None
            options = replace(options, queries=scaled)
        elif own.has_norms:  # behind the rotation, which changes no length
            ones = torch.ones(config.head_dim, dtype=source.dtype, device=source.kernels.device)
            options = replace(options, qk_norm=QKNorm(ones, ones, config.norm_eps))
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(source, f"{at}.self_attn", config.attention_shape(index), rope, hidden, options)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = read_experts(config, source, at, NAMES) if config.has_experts(index) else GatedMLP(
            source, f"{at}.feed_forward", (hidden, config.intermediate_size))


def _scaled(own: Llama4Config, queries: Tensor, positions: Tensor) -> Tensor:
    scales = torch.log1p(torch.floor((positions.float() + 1) / own.floor)) * own.scale + 1
    return (queries * scales[:, None, None]).to(queries.dtype)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(Llama4Layer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

"""DBRX (Databricks, 2024): Llama with LayerNorms, queries, keys and values that are clipped, and experts whose matrices
are rows of three tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from slotwise.compute.kernels.interface import ExpertWeights, Routing
from slotwise.compute.model.families.llama import LlamaLayer, clipped
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import MixtureOfExperts, separate_experts
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import NO_CUTS, WeightSource, expert_share
from slotwise.compute.model.model_config import (
    MAX_EXPERT_SIZE,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_routing,
)
from slotwise.compute.model.network import Network, read_network
from slotwise.compute.model.stored_tensors import Cut

NAMES = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
         "max_seq_len": "max_position_embeddings"}
SIZES = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048,
         "vocab_size": 32000}
NORMS = LayerNormOptions(1e-5, has_bias=False)


def configure(fields: Fields) -> ModelConfig:
    attention, experts = fields.section("attn_config"), fields.section("ffn_config")
    if fields.flag("tie_word_embeddings"):
        raise fields.error("tie_word_embeddings", "is true, which is not supported in this architecture")
    activation = experts.section("ffn_act_fn").text("name", default="silu")
    if activation != "silu":
        raise experts.error("ffn_act_fn", f"must be silu, not {activation!r:.40}")
    normalizes = experts.number("moe_normalize_expert_weights", default=1.0)
    if normalizes != 1:
        raise experts.error("moe_normalize_expert_weights", f"must be 1 or null, not {normalizes:g}")
    size = experts.integer("ffn_hidden_size", default=3584, maximum=MAX_EXPERT_SIZE)
    theta = attention.number("rope_theta", default=10_000.0)
    fields = fields.renamed(NAMES).with_defaults(**SIZES).replaced(
        intermediate_size=size, num_key_value_heads=attention.integer("kv_n_heads", default=1), head_dim=None)
    config = read_common(fields, ConfigDefaults(rope_theta=theta), ())
    is_normalized = not experts.is_null("moe_normalize_expert_weights")
    routing = read_routing(experts, Routing(4, 1, is_normalized=is_normalized), "moe_num_experts", "moe_top_k")
    return replace(
        config, norm_eps=NORMS.eps, mixture=MixtureConfig(routing, size, (True,) * config.num_layers),
        qkv_clip=attention.number("clip_qkv") if attention.has("clip_qkv") else 0.0)


def _read_rows(source: WeightSource, name: str, sizes: tuple[int, int], count: int) -> Iterator[ExpertWeights]:
    """The experts of tensors with a row for each number between an expert's products."""
    hidden, intermediate = sizes
    held = expert_share(count, source.group)
    rows = Cut((range(held.start * intermediate, held.stop * intermediate),)) if held is not None else None
    gates, ups, downs = (
        source.tensor({at: (count * intermediate, hidden)}, NO_CUTS if rows is None else {at: rows}).split(intermediate)
        for at in (f"{name}.{part}" for part in ("w1", "v1", "w2")))
    for gate, up, down in zip(gates, ups, downs, strict=True):
        yield ExpertWeights(torch.cat((gate, up)), down.T.contiguous())


class DbrxLayer(LlamaLayer):
    """Llama's layer with these norms and experts."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, mixture = f"model.layers.{index}", config.hidden_size, config.mixture_of_experts
        options = AttentionOptions(qkv_name="Wqkv", names=("", "", "", "out_proj"), qkv=clipped(config.qkv_clip))
        self.attention_norm = NORMS.read(source, f"{at}.norm_attn_norm.norm_1", hidden)
        self.attention = Attention(
            source, f"{at}.norm_attn_norm.attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm = NORMS.read(source, f"{at}.norm_attn_norm.norm_2", hidden)
        sizes, count = (hidden, mixture.intermediate_size), mixture.routing.num_experts
        router = Linear(source, {f"{at}.ffn.router.layer": count}, hidden, is_exact=True)
        experts = separate_experts(source, f"{at}.ffn.experts", ("w1", "v1", "w2"), sizes, count) if (
            mixture.are_split) else _read_rows(source, f"{at}.ffn.experts.mlp", sizes, count)
        self.mlp = MixtureOfExperts(router, experts, sizes, mixture.routing, source)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(DbrxLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NORMS)

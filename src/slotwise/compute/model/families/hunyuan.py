"""Hunyuan (Tencent, 2025): Llama with norms of each head's query and key behind the rotary embedding; with one MLP in
every layer, or with experts and an MLP that all tokens share.

Kernels norm before they rotate.  A rotation does not change a length, so only the weights belong behind it: keys are
cached without theirs, and queries are multiplied by both.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import QKNorm, Routing
from slotwise.compute.model.families.llama import LlamaLayer, ReadExperts
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_head_dim,
    read_routing,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5)


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(_with_alpha(fields), DEFAULTS), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias)


def _with_alpha(fields: Fields) -> Fields:
    """A base raised by `alpha` in place of the scaling called dynamic, which it makes static."""
    name = "rope_scaling" if fields.section("rope_scaling").values else "rope_parameters"
    rope = fields.section(name)
    if rope.text("rope_type", default=rope.text("type", default="default")) != "dynamic" or not rope.has("alpha"):
        return fields
    head_dim = read_head_dim(fields)
    base = rope.number("rope_theta", default=fields.number("rope_theta", default=10_000.0))
    theta = base * rope.number("alpha") ** (head_dim / (head_dim - 2))
    return Fields({**fields.values, name: {"rope_type": "default", "rope_theta": theta}}, fields.where)


class HunyuanLayer(LlamaLayer):
    """Llama's layer with these norms."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, experts: ReadExperts | None = None,
    ) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        query, key = (source.tensor({f"{at}.self_attn.{part}_layernorm.weight": (config.head_dim,)})
                      for part in ("query", "key"))
        norm = QKNorm(torch.ones_like(query), torch.ones_like(key), config.norm_eps)
        weighted = functools.partial(_weighted, query.float() * key.float())
        options = AttentionOptions(config.qkv_bias, config.output_bias, norm, queries=weighted)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention.bytes += query.nbytes + key.nbytes
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = experts(config, source, at) if experts else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size))


def _weighted(weight: Tensor, queries: Tensor, positions: Tensor) -> Tensor:
    return (queries * weight).to(queries.dtype)


def compose(config: ModelConfig, source: WeightSource, experts: ReadExperts | None = None) -> Network:
    layer = functools.partial(HunyuanLayer, config, source, experts=experts)
    ends = EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))


NAMES = ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp")


def configure_moe(fields: Fields) -> ModelConfig:
    """Published configs give some numbers for each layer: all must be the same."""
    for name in ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert"):
        given = fields.values.get(name)
        if isinstance(given, list):
            if len(given) > MAX_LAYERS or not given or any(each != given[0] for each in given):
                raise fields.error(name, "must be the same in every layer")
            fields = Fields({**fields.values, name: given[0]}, fields.where)
    config = configure(fields)
    size = config.intermediate_size
    for name, only in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if fields.integer(name, default=only) != only:
            raise fields.error(name, f"must be {only}")
    routing = read_routing(fields, Routing(1, 1, is_normalized=True), "num_experts", "moe_topk")
    return replace(config, mixture=MixtureConfig(routing, size, (True,) * config.num_layers, size))


def compose_moe(config: ModelConfig, source: WeightSource) -> Network:
    return compose(config, source, functools.partial(read_experts, names=NAMES))

"""Aria (Rhymes AI, 2024), text: Llama with experts, of which all tokens share some."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import MAX_EXPERTS, MixtureConfig, ModelConfig, read_routing
from slotwise.compute.model.network import ExpertNames, Network, read_experts

NAMES = ExpertNames("mlp.router", stacked=("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"), are_transposed=True)


def configure(fields: Fields) -> ModelConfig:
    fields = fields if fields.has("intermediate_size") else Fields(
        {**fields.values, "intermediate_size": 4096}, fields.where)
    config = llama.configure(fields)
    routing = read_routing(fields, Routing(8, 2, is_normalized=True), "moe_num_experts", "moe_topk")
    size = config.intermediate_size
    shared = size * fields.integer("moe_num_shared_experts", default=2, maximum=MAX_EXPERTS)
    return replace(config, mixture=MixtureConfig(routing, size, (True,) * config.num_layers, shared))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=NAMES))

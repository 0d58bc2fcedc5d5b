"""Granite 3's mixtures of experts (Granite Team, 2024): Granite with experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace

from slotwise.kernels.interface import Routing
from slotwise.model.config import ModelConfig, read_mixture
from slotwise.model.families import granite, llama
from slotwise.model.fields import Fields
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.moe import SPLIT, MixtureOfExperts, separate_experts, stacked_experts
from slotwise.model.layers.source import Source
from slotwise.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    config = granite.configure(fields)
    return replace(config, mixture=read_mixture(fields, config, Routing(8, 2, is_normalised=True)))


def compose(config: ModelConfig, source: Source) -> Network:
    return llama.compose(config, source, experts)


def experts(config: ModelConfig, source: Source, at: str) -> MixtureOfExperts:
    mixture, name = config.mixture_of_experts, f"{at}.block_sparse_moe"
    sizes, routing = (config.hidden_size, mixture.intermediate_size), mixture.routing
    router = Linear(source, {f"{name}.router.layer": routing.num_experts}, config.hidden_size, is_exact=True)
    names, count = (f"{name}.input_linear.weight", f"{name}.output_linear.weight"), routing.num_experts
    weights = (separate_experts(source, f"{name}.experts", SPLIT, sizes, count) if mixture.are_split else
               stacked_experts(source, names, sizes, count))
    return MixtureOfExperts(router, weights, sizes, routing, source)

"""Mixtral (Jiang et al., 2024): Mistral with eight experts in place of the MLP, two of which a token chooses."""

from __future__ import annotations

from dataclasses import replace

from slotwise.kernels.interface import Routing
from slotwise.model.config import Defaults, ModelConfig, read_common, read_mixture, read_window
from slotwise.model.families import llama
from slotwise.model.fields import Fields
from slotwise.model.layers.linear import Linear
from slotwise.model.layers.moe import MixtureOfExperts, separate_experts
from slotwise.model.layers.source import Source
from slotwise.model.network import Network

DEFAULTS = Defaults(num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0)


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields, DEFAULTS)
    return replace(
        config,
        windows=(read_window(fields, 0),) * config.num_layers,
        mixture=read_mixture(fields, config, Routing(8, 2, is_normalised=True)),
    )


def compose(config: ModelConfig, source: Source) -> Network:
    return llama.compose(config, source, experts)


def experts(config: ModelConfig, source: Source, at: str) -> MixtureOfExperts:
    mixture, name = config.mixture_of_experts, f"{at}.block_sparse_moe"
    sizes, routing = (config.hidden_size, mixture.intermediate_size), mixture.routing
    router = Linear(source, {f"{name}.gate": routing.num_experts}, config.hidden_size, is_exact=True)
    weights = separate_experts(source, f"{name}.experts", ("w1", "w3", "w2"), sizes, routing.num_experts)
    return MixtureOfExperts(router, weights, sizes, routing, source)

"""Mistral (Jiang et al., 2023): Llama with a sliding attention window, in every layer or by `layer_types`.

Mixtral (Jiang et al., 2024) has eight experts in place of the MLP; each token chooses two.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import MixtureOfExperts, separate_experts
from slotwise.compute.model.layers.source import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mixture,
    read_window,
)
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    """Reads a config with `layer_types` as transformers' Ministral: the window holds in the layers that it names."""
    config, window = read_common(fields, ConfigDefaults(num_kv_heads=8)), read_window(fields)
    return replace(config, windows=read_layer_types(fields, window, [SLIDING if window else FULL] * config.num_layers))


MIXTRAL = ConfigDefaults(num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0)


def configure_mixtral(fields: Fields) -> ModelConfig:
    config = read_common(fields, MIXTRAL)
    return replace(
        config,
        windows=(read_window(fields, 0),) * config.num_layers,
        mixture=read_mixture(fields, config, Routing(8, 2, is_normalized=True)),
    )


def compose_mixtral(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, mixtral_experts)


def mixtral_experts(config: ModelConfig, source: WeightSource, at: str) -> MixtureOfExperts:
    mixture, name = config.mixture_of_experts, f"{at}.block_sparse_moe"
    sizes, routing = (config.hidden_size, mixture.intermediate_size), mixture.routing
    router = Linear(source, {f"{name}.gate": routing.num_experts}, config.hidden_size, is_exact=True)
    weights = separate_experts(source, f"{name}.experts", ("w1", "w3", "w2"), sizes, routing.num_experts)
    return MixtureOfExperts(router, weights, sizes, routing, source)

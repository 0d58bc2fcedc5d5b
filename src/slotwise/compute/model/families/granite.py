"""Granite 3 (Granite Team, 2024): Llama with factors for embedding, scores, logits and the residual stream.

    h = h + m * attention(norm(h)),  h = h + m * down(silu(gate(norm(h))) * up(norm(h)))

The residual stream is kept divided by m, which needs no multiplication in a step: the embedding is divided by m, sums
have the factor 1, and since a norm divides by the size of its input, only its epsilon changes, to epsilon / m**2.  The
mixtures of experts have experts in place of the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import SPLIT, MixtureOfExperts, separate_experts, stacked_experts
from slotwise.compute.model.layers.source import WeightSource
from slotwise.compute.model.model_config import ModelConfig, read_mixture
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    config, residual = llama.configure(fields), fields.number("residual_multiplier", default=1.0)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / residual,
        norm_eps=config.norm_eps / residual**2,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )


def configure_moe(fields: Fields) -> ModelConfig:
    config = configure(fields)
    return replace(config, mixture=read_mixture(fields, config, Routing(8, 2, is_normalized=True)))


def compose_moe(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, experts)


def experts(config: ModelConfig, source: WeightSource, at: str) -> MixtureOfExperts:
    mixture, name = config.mixture_of_experts, f"{at}.block_sparse_moe"
    sizes, routing = (config.hidden_size, mixture.intermediate_size), mixture.routing
    router = Linear(source, {f"{name}.router.layer": routing.num_experts}, config.hidden_size, is_exact=True)
    names, count = (f"{name}.input_linear.weight", f"{name}.output_linear.weight"), routing.num_experts
    weights = (separate_experts(source, f"{name}.experts", SPLIT, sizes, count) if mixture.are_split else
               stacked_experts(source, names, sizes, count))
    return MixtureOfExperts(router, weights, sizes, routing, source)

"""Granite 3 (Granite Team, 2024): Llama with factors for embedding, scores, logits and the residual stream.

    h = h + m * attention(norm(h)),  h = h + m * down(silu(gate(norm(h))) * up(norm(h)))

The residual stream is kept divided by m, which needs no multiplication in a step: the embedding is divided by m, sums
have the factor 1, and since a norm divides by the size of its input, only its epsilon changes, to epsilon / m**2.  The
mixtures of experts have experts in place of the MLP.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    PLAIN_DEFAULTS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_layer_types,
    read_mixture,
    read_window,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts


def configure(fields: Fields, defaults: ConfigDefaults = PLAIN_DEFAULTS) -> ModelConfig:
    config, residual = llama.configure(fields, defaults), fields.number("residual_multiplier", default=1.0)
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


EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer", "block_sparse_moe.experts",
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"), shared="shared_mlp",
    shared_parts=("input_linear", "output_linear"))
experts = functools.partial(read_experts, names=EXPERTS)
"""Reads the experts of a layer, and the one that all tokens share, if the model has it."""


def compose_moe(config: ModelConfig, source: WeightSource) -> Network:
    """Also with a shared expert."""
    return llama.compose(config, source, experts)


WINDOWED = ConfigDefaults(num_kv_heads=4, norm_eps=1e-5, tie_word_embeddings=True)


def configure_shared(fields: Fields) -> ModelConfig:
    """With an expert that all tokens share."""
    config = configure_moe(fields)
    size = fields.integer("shared_intermediate_size", default=0, minimum=0)
    return replace(config, mixture=replace(config.mixture_of_experts, shared_intermediate_size=size))


def configure_windows(fields: Fields) -> ModelConfig:
    """With a window in most layers, and a base of the rotary embedding, or no positions, for each layer."""
    return _with_windows(fields, configure(fields, WINDOWED))


def configure_moe_windows(fields: Fields) -> ModelConfig:
    return _with_windows(fields, configure_shared(fields))


def _with_windows(fields: Fields, config: ModelConfig) -> ModelConfig:
    kinds = tuple(SLIDING if layer % 4 else FULL for layer in range(config.num_layers))
    ropes = config.ropes
    if fields.has("layer_rope_theta"):
        thetas = fields.numbers("layer_rope_theta", minimum=-1.0)
        if len(thetas) != config.num_layers:
            raise fields.error("layer_rope_theta", f"must be a number for each of {config.num_layers} layers")
        ropes = tuple(replace(rope, theta=theta) if theta else NoRope()
                      for rope, theta in zip(ropes, thetas, strict=True))
    return replace(config, ropes=ropes, windows=read_layer_types(fields, read_window(fields, 128), kinds))


SINKS = AttentionOptions(sinks="sinks")
STACKED = EXPERTS._replace(router="block_sparse_moe.router", stacked=(
    "block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"))


def compose_windows(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=STACKED), SINKS)

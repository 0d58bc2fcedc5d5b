"""Mistral (Jiang et al., 2023): Llama with a sliding attention window, in every layer or by `layer_types`.

Ministral 3 (Mistral AI, 2025) sharpens the scores of queries beyond the original context, as Llama 4 does:

    q *= 1 + beta * ln(1 + floor(position / original))

Mixtral (Jiang et al., 2024) has eight experts in place of the MLP; each token chooses two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_mixture,
    read_window,
    text_part,
)
from slotwise.compute.model.network import ExpertNames, Network, read_experts


def configure(fields: Fields) -> ModelConfig:
    """Reads a config with `layer_types` as transformers' Ministral: the window holds in the layers that it names."""
    config, window = read_common(fields, ConfigDefaults(num_kv_heads=8)), read_window(fields)
    return replace(config, windows=read_layer_types(fields, window, [SLIDING if window else FULL] * config.num_layers))


@dataclass(frozen=True, slots=True)
class Sharpening:
    """Of the scores of late queries."""

    beta: float
    original: int  # tokens of the original context


MINISTRAL3 = ConfigDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=1_000_000.0)
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def configure_ministral3(fields: Fields) -> ModelConfig:
    if not fields.section("rope_parameters").values and not fields.section("rope_scaling").values:
        fields = Fields({**fields.values, "rope_parameters": MINISTRAL3_ROPE}, fields.where)
    config = read_common(fields, MINISTRAL3)
    rope = fields.section("rope_scaling" if fields.section("rope_scaling").values else "rope_parameters")
    sharpening = Sharpening(rope.number("llama_4_scaling_beta"), rope.integer("original_max_position_embeddings"))
    return replace(config, windows=(read_window(fields, 0),) * config.num_layers, own=sharpening)


def compose_ministral3(config: ModelConfig, source: WeightSource) -> Network:
    assert isinstance(config.own, Sharpening)
    return llama.compose(config, source, None, AttentionOptions(queries=functools.partial(_sharpened, config.own)))


def _sharpened(sharpening: Sharpening, queries: Tensor, positions: Tensor) -> Tensor:
    lengths = (positions // sharpening.original).double().log1p()
    return queries * (1 + sharpening.beta * lengths)[:, None, None].to(queries.dtype)


MISTRAL3_TEXT = {  # of a config for images and text, which leaves out what is as in Mistral Small 3.1
    "hidden_size": 5120, "intermediate_size": 32768, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 40, "vocab_size": 131072, "rope_theta": 1e9, "head_dim": 128, "rms_norm_eps": 1e-5,
    "sliding_window": None}


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text: that of Mistral or of Ministral 3."""
    kind = fields.section("text_config").text("model_type", default="mistral")
    if kind == "ministral3":
        return configure_ministral3(text_part(fields, {}))
    if kind != "mistral":
        raise fields.error("text_config", f"has model_type {kind!r:.40}, which is not supported here")
    return configure(text_part(fields, MISTRAL3_TEXT))


def compose_text(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source) if config.own is None else compose_ministral3(config, source)


MIXTRAL = ConfigDefaults(num_kv_heads=8, norm_eps=1e-5, rope_theta=1_000_000.0)


def configure_mixtral(fields: Fields) -> ModelConfig:
    config = read_common(fields, MIXTRAL)
    return replace(
        config,
        windows=(read_window(fields, 0),) * config.num_layers,
        mixture=read_mixture(fields, config, Routing(8, 2, is_normalized=True)),
    )


EXPERTS = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))


def compose_mixtral(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, functools.partial(read_experts, names=EXPERTS))

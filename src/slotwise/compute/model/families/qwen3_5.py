"""Qwen3.5 (Qwen Team, 2026), text: Qwen3-Next with separate weights in layers with a recurrent state; with one MLP in
every layer, or with experts.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families.qwen3_next import HEAD_DIM, read_hybrid
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_mixture, text_part


def configure(fields: Fields) -> ModelConfig:
    return read_hybrid(fields, ConfigDefaults(num_kv_heads=4, head_dim=HEAD_DIM), is_interleaved=False)


def configure_moe(fields: Fields) -> ModelConfig:
    """Every layer has experts, and the config no size of an MLP."""
    fields = Fields({"intermediate_size": 1, **fields.values}, fields.where)
    config = read_hybrid(fields, ConfigDefaults(num_kv_heads=2, head_dim=HEAD_DIM), is_interleaved=False)
    mixture = read_mixture(fields, config, Routing(256, 8, is_normalized=True), intermediate_size=512)
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    return replace(config, mixture=replace(mixture, shared_intermediate_size=shared))


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text: prompts are text."""
    return configure(text_part(fields, {}))


def configure_moe_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text with experts."""
    return configure_moe(text_part(fields, {}))

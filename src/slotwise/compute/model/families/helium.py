"""Helium (Kyutai, 2025): Llama that rotates pairs of neighbors."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common

DEFAULTS = ConfigDefaults(num_kv_heads=20, head_dim=128, norm_eps=1e-8, rope_theta=100_000.0)


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields, DEFAULTS)
    if config.head_dim * config.num_heads != config.hidden_size:
        raise fields.error("head_dim", f"({config.head_dim}) times num_attention_heads ({config.num_heads}) must be "
                           f"hidden_size ({config.hidden_size})")
    return replace(config, ropes=tuple(replace(rope, has_neighbors=True) for rope in config.ropes),
                   qkv_bias=fields.flag("attention_bias"), mlp_bias=fields.flag("mlp_bias"))

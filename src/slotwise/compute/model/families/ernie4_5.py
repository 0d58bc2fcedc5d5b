"""ERNIE 4.5 (Baidu, 2025), dense: Llama that rotates pairs of neighbors."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common

DEFAULTS = ConfigDefaults(
    num_kv_heads=2, head_dim=128, norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, DEFAULTS), fields.flag("use_bias")
    ropes = tuple(replace(rope, has_neighbors=True) for rope in config.ropes)
    return replace(config, ropes=ropes, qkv_bias=bias, output_bias=bias, mlp_bias=bias)

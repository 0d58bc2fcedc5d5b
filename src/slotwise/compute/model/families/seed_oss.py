"""Seed-OSS (ByteDance, 2025): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common


def configure(fields: Fields) -> ModelConfig:
    return replace(
        read_common(fields, ConfigDefaults(num_kv_heads=8, head_dim=128)),
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )

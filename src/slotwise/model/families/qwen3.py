"""Qwen3 (Yang et al., 2025): Llama with a norm on each head's query and key, and a head size of its own."""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import Defaults, ModelConfig, read_common, read_layer_windows
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, Defaults(num_kv_heads=32, head_dim=128)),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=read_layer_windows(fields),
    )

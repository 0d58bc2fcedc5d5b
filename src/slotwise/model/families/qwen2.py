"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with a bias on queries, keys and values, and windows by layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import Defaults, ModelConfig, read_common, read_layer_windows
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    return replace(read_common(fields, Defaults(num_kv_heads=32)), qkv_bias=True, windows=read_layer_windows(fields))

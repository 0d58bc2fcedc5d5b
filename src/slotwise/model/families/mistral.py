"""Mistral (Jiang et al., 2023): Llama with a sliding attention window, in every layer or in those of `layer_types`."""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import FULL, SLIDING, Defaults, ModelConfig, read_common, read_layer_types, read_window
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    """Reads a config with `layer_types` as transformers' Ministral: the window holds in the layers that it names."""
    config, window = read_common(fields, Defaults(num_kv_heads=8)), read_window(fields)
    return replace(config, windows=read_layer_types(fields, window, [SLIDING if window else FULL] * config.num_layers))

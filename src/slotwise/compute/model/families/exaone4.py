"""EXAONE 4 (LG AI Research, 2025): norms behind attention and MLP as in OLMo 2, and of each head's query and key; where
layers have windows, those without have no positions.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families import olmo2
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_window,
)
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    config, window = read_common(fields, ConfigDefaults(num_kv_heads=32, norm_eps=1e-5)), read_window(fields)
    kinds: tuple[str, ...] = (FULL,) * config.num_layers
    if window and not fields.has("layer_types"):
        pattern = fields.integer("sliding_window_pattern", default=4)
        kinds = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(config.num_layers))
    windows = read_layer_types(fields, window, kinds)
    ropes = tuple(NoRope() if window and not each else config.ropes[0] for each in windows)
    return replace(config, windows=windows, ropes=ropes, qk_norm=True)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return olmo2.compose(config, source, norms_all_heads=False)

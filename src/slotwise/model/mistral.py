"""Mistral (Jiang et al., 2023): Llama with a sliding attention window, the same in every layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import ModelConfig, read_common
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    config = read_common(fields)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else 0
    return replace(config, windows=(window,) * config.num_layers)

"""OLMo 3 (OLMo Team, 2025): OLMo 2 with a window in three of four layers, whose rotary embedding is not scaled."""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import FULL, MAX_LAYERS, SLIDING, ModelConfig, read_layer_types, read_window
from slotwise.model.families import olmo2
from slotwise.model.fields import Fields
from slotwise.model.ropes import read_ropes

THETA = 500_000.0


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers))
    windows = read_layer_types(fields, read_window(fields), kinds)
    ropes = read_ropes(fields, {FULL: fields.number("rope_theta", default=THETA), SLIDING: THETA})
    return replace(olmo2.configure(fields, [ropes[kind] for kind in kinds]), windows=windows)

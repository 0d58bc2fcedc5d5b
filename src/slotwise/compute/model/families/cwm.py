"""Code World Model (Meta, 2025): Llama with a window in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_window,
)

ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192}
DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=1_000_000.0)
ENDS = [128001, 128008, 128009]


def configure(fields: Fields) -> ModelConfig:
    absent: dict[str, object] = {} if fields.has("eos_token_id") else {"eos_token_id": ENDS}
    if not fields.section("rope_parameters").values and not fields.section("rope_scaling").values:
        absent |= {"rope_parameters": ROPE}
    fields = Fields({**fields.values, **absent}, fields.where)
    kinds = [SLIDING if layer % 4 else FULL for layer in range(fields.integer("num_hidden_layers", maximum=MAX_LAYERS))]
    return replace(read_common(fields, DEFAULTS), windows=read_layer_types(fields, read_window(fields, 8192), kinds),
                   mlp_bias=fields.flag("mlp_bias"))

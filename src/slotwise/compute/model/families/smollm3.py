"""SmolLM3 (Hugging Face, 2025): Llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
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

DEFAULTS = ConfigDefaults(num_kv_heads=4, rope_theta=2_000_000.0, tie_word_embeddings=True)


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, DEFAULTS), fields.flag("attention_bias")
    rotates = _rotates(fields, config.num_layers)
    window = read_window(fields, 0) if fields.flag("use_sliding_window") else 0
    kinds = [FULL if turns or not window else SLIDING for turns in rotates]
    if SLIDING in fields.texts("layer_types") and not fields.flag("use_sliding_window"):
        raise fields.error("layer_types", "asks for sliding attention, but use_sliding_window is false")
    return replace(
        config,
        ropes=tuple(rope if turns else NoRope() for rope, turns in zip(config.ropes, rotates, strict=True)),
        windows=read_layer_types(fields, window, kinds),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _rotates(fields: Fields, num_layers: int) -> list[bool]:
    """Whether each layer rotates: a 1 in `no_rope_layers`."""
    if not fields.has("no_rope_layers"):
        interval = fields.integer("no_rope_layer_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    flags = fields.integers("no_rope_layers", maximum=1)
    if len(flags) < num_layers:
        raise fields.error("no_rope_layers", f"names {len(flags)} layers, num_hidden_layers {num_layers}")
    return [flag == 1 for flag in flags[:num_layers]]

"""dots.llm1 (rednote-hilab, 2025): Qwen3 with DeepSeek-V3's experts, and windows in its last layers."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_grouped_mixture,
    read_layer_types,
    read_window,
)


def configure(fields: Fields) -> ModelConfig:
    for name in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"):
        if not fields.has(name):
            raise fields.error(name, "is missing")
    config, bias = read_common(fields, ConfigDefaults(num_kv_heads=32)), fields.flag("attention_bias")
    window, first = read_window(fields), fields.integer("max_window_layers", default=62, minimum=0)
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(config.num_layers)]
    routing = Routing(1, 1, is_normalized=False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=read_layer_types(fields, window, kinds),
        mixture=read_grouped_mixture(fields, config.num_layers, routing, intermediate_size=1408, num_dense=0),
    )

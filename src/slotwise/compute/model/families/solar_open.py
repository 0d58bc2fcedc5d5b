"""Solar Open (Upstage, 2026): Llama with DeepSeek-V3's experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common, read_grouped_mixture

DEFAULTS = ConfigDefaults(num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=1_000_000.0)


def configure(fields: Fields) -> ModelConfig:
    """Every layer has experts, and the config no size of an MLP."""
    fields = Fields({**fields.values, "intermediate_size": 1, "first_k_dense_replace": 0}, fields.where)
    config = read_common(fields, DEFAULTS)
    routing = Routing(128, 8, is_normalized=True)
    return replace(
        config,
        qkv_bias=fields.flag("attention_bias"),
        mixture=read_grouped_mixture(fields, config.num_layers, routing, intermediate_size=1280),
    )

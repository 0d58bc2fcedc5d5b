"""OLMoE (Muennighoff et al., 2024): Llama with 64 experts, of which a token chooses eight, and norms over all queries
and all keys of a token.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import llama, qwen2
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common, read_mixture
from slotwise.compute.model.network import Network


def configure(fields: Fields) -> ModelConfig:
    fields.refuse(("clip_qkv",), "is set, which is not supported")
    config, bias = read_common(fields, ConfigDefaults(norm_eps=1e-5)), fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm=True,
                   mixture=read_mixture(fields, config, Routing(64, 8, is_normalized=False)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return llama.compose(config, source, qwen2.experts, AttentionOptions(norms_all_heads=True))

"""StableLM (Stability AI, 2023): Llama with LayerNorms, a quarter of whose heads rotates.

StableLM 2 12B norms each head's queries and keys, and its attention and MLP read the same normed states.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, compose_layers
from slotwise.compute.model.families.gpt_neox import read_partial
from slotwise.compute.model.families.gptj import SharedNormLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.norm import HeadNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network

DEFAULTS = ConfigDefaults(num_kv_heads=32, norm_eps=1e-5)
PARTS = Parts("input_layernorm", "self_attn", "post_attention_layernorm")


def configure(fields: Fields) -> ModelConfig:
    return replace(
        read_partial(fields, 0.25, "silu", DEFAULTS), has_gated_mlp=True, mlp_bias=False, output_bias=False,
        qkv_bias=fields.flag("use_qkv_bias"), qk_norm=fields.flag("qk_layernorm"),
        is_parallel=fields.flag("use_parallel_residual"))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    norms = HeadNormOptions(config.norm_eps, stored="separate") if config.qk_norm else None
    options = AttentionOptions(config.qkv_bias, head_norm=norms)
    if config.is_parallel:
        return compose_layers(config, source, SharedNormLayer, PARTS._replace(mlp_norm=""), options)
    return compose_layers(config, source, ClassicLayer, PARTS, options)

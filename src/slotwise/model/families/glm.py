"""GLM-4 (Team GLM, 2024): Llama that rotates half of a head, in pairs of neighbours; since 0414 with norms behind
attention and MLP, too.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.fields import Fields
from slotwise.model.layers.attention import Attention, AttentionOptions
from slotwise.model.layers.embedding_and_head import EndOptions
from slotwise.model.layers.mlp import GatedMLP
from slotwise.model.layers.norm import NormOptions, RMSNorm
from slotwise.model.layers.source import WeightSource
from slotwise.model.model_config import MAX_LAYERS, ConfigDefaults, ModelConfig, read_common, read_head_dim, read_rope
from slotwise.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(num_kv_heads=2, head_dim=128, rms_norm_eps=0.00000015625)


def configure(fields: Fields) -> ModelConfig:
    fields = Fields({"partial_rotary_factor": 0.5, **fields.values}, fields.where)
    head_dim = read_head_dim(fields) if fields.has("head_dim") else DEFAULTS.head_dim
    rope = replace(read_rope(fields, head_dim=head_dim), has_neighbours=True)
    config = read_common(fields, DEFAULTS, ropes=(rope,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS))
    return replace(config, qkv_bias=fields.flag("attention_bias", default=True), has_fused_gates=True)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """The version of 0414."""
    hidden, norms = config.hidden_size, NormOptions(config.rms_norm_eps)
    options, sizes = AttentionOptions(config.qkv_bias), (hidden, config.intermediate_size)

    def layer(index: int) -> DecoderLayer:
        at, shape = f"model.layers.{index}", config.attention_shape(index)
        return DecoderLayer(
            attention_norm=RMSNorm(source, f"{at}.input_layernorm", hidden, norms),
            attention=Attention(source, f"{at}.self_attn", shape, config.ropes[index], hidden, options),
            attention_post_norm=RMSNorm(source, f"{at}.post_self_attn_layernorm", hidden, norms),
            mlp_norm=RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms),
            mlp=GatedMLP(source, f"{at}.mlp", sizes, is_fused=True),
            mlp_post_norm=RMSNorm(source, f"{at}.post_mlp_layernorm", hidden, norms))

    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings), norms)

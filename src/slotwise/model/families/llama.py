"""Llama 2 and 3.x (Touvron et al., 2023; Grattafiori et al., 2024), and what shares their shape, such as SmolLM2.

    x = x + attention(norm(x)),  x = x + down(silu(gate(norm(x))) * up(norm(x)))

Later versions differ only in numbers: fewer key than query heads, a larger rotary base, `llama3` scaling, a head tied
to the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slotwise.model.fields import Fields
from slotwise.model.layers.attention import Attention, AttentionOptions
from slotwise.model.layers.embedding_and_head import EndOptions
from slotwise.model.layers.mlp import GatedMLP
from slotwise.model.layers.norm import NormOptions, RMSNorm
from slotwise.model.layers.source import WeightSource
from slotwise.model.model_config import ModelConfig, read_common
from slotwise.model.network import MLP, DecoderLayer, Network, read_network

ReadExperts = Callable[[ModelConfig, WeightSource, str], MLP]


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(read_common(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def compose(
    config: ModelConfig, source: WeightSource, experts: ReadExperts | None = None, *, norms_all_heads: bool = False,
    sinks: bool = False,
) -> Network:
    """Also other families', with the biases, norms of queries and keys, windows and scales that their configs have.

    `experts` reads those of a layer of the name that it is given.  For the others see `AttentionOptions`.
    """
    hidden, norms = config.hidden_size, NormOptions(config.rms_norm_eps)
    options = AttentionOptions(config.qkv_bias, config.output_bias, norms if config.qk_norm else None,
                               norms_all_heads, sinks, "qkv_proj" if config.has_fused_qkv else "")

    def mlp(index: int) -> MLP:
        at, sizes = f"model.layers.{index}", (hidden, config.intermediate_size)
        if experts is not None and config.has_experts(index):
            return experts(config, source, at)
        return GatedMLP(source, f"{at}.mlp", sizes, bias=config.mlp_bias, is_fused=config.has_fused_gates)

    def layer(index: int) -> DecoderLayer:
        at, shape = f"model.layers.{index}", config.attention_shape(index)
        return DecoderLayer(
            attention_norm=RMSNorm(source, f"{at}.input_layernorm", hidden, norms),
            attention=Attention(source, f"{at}.self_attn", shape, config.ropes[index], hidden, options),
            mlp_norm=RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms),
            mlp=mlp(index))

    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale)
    return read_network(config, source, layer, ends, norms)

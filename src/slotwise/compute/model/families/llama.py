"""Llama 2 and 3.x (Touvron et al., 2023; Grattafiori et al., 2024), and what shares their shape, such as SmolLM2.

    h += attention(norm(h)),  h += down(silu(gate(norm(h))) * up(norm(h)))

Later versions differ only in numbers: fewer key than query heads, a larger rotary base, `llama3` scaling, a head tied
to the embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import PLAIN, Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import Norm, NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import PLAIN_DEFAULTS, ConfigDefaults, ModelConfig, read_common
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network

ReadExperts = Callable[[ModelConfig, WeightSource, str], MLP]


def configure(fields: Fields, defaults: ConfigDefaults = PLAIN_DEFAULTS) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(read_common(fields, defaults), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


class LlamaLayer(DecoderLayer):
    """Also other families' layer, with the biases, norms of queries and keys, windows and scales of their configs.

    Args:
        experts: reads the experts of the layer with a given name, in place of an MLP.
        options: of its attention, in addition to those of the config.
    """

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, experts: ReadExperts | None = None,
        options: AttentionOptions = PLAIN,
    ) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        options = replace(
            options, qkv_bias=config.qkv_bias, output_bias=config.output_bias,
            qk_norm=norms if config.qk_norm else None, qkv_name="qkv_proj" if config.has_fused_qkv else "",
            qkv=clipped(config.qkv_clip))
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm: Norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp: MLP = experts(config, source, at) if experts and config.has_experts(index) else GatedMLP(
            source, f"{at}.mlp", (hidden, config.intermediate_size), bias=config.mlp_bias,
            is_fused=config.has_fused_gates)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


def clipped(limit: float) -> Callable[[Tensor], Tensor] | None:
    """Clips queries, keys and values to `-limit ... limit`; None for 0: values are not clipped."""
    return functools.partial(torch.clamp, min=-limit, max=limit) if limit else None


def compose(
    config: ModelConfig, source: WeightSource, experts: ReadExperts | None = None, options: AttentionOptions = PLAIN,
    *, head_bias: bool = False,
) -> Network:
    """A model of `LlamaLayer`s with these options."""

    def layer(index: int) -> LlamaLayer:
        return LlamaLayer(config, source, index, experts, options)

    ends = EndOptions(
        config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale, head_bias=head_bias)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

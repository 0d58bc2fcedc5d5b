"""Gemma (Gemma Team, 2024): Llama with GELU, a scaled embedding, and norms whose weights are offsets from 1.

    h += attention(norm(h)),  h += down(gelu(gate(norm(h))) * up(norm(h)))

Gemma 2 (Gemma Team, 2024): norms before and after attention and MLP, capped scores and logits, a window in every
second layer.

    h += norm(attention(norm(h))),  h += norm(down(gelu(gate(norm(h))) * up(norm(h))))

Gemma 3 (Gemma Team, 2025), text: norms of queries and keys instead of capped scores.  Five of six layers have a window,
and a rotary embedding of their own.  EmbeddingGemma (Gemma Team, 2025) is such a model whose tokens attend to both
sides.  VaultGemma (2025) is Gemma 2 without the norms behind attention and MLP.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_layer_types,
    read_ropes,
    read_window,
    text_part,
)
from slotwise.compute.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(num_kv_heads=4, head_dim=256, tie_word_embeddings=True)
ACTIVATIONS = ("gelu_pytorch_tanh",)


def configure_gemma1(fields: Fields) -> ModelConfig:
    """The first checkpoints name another GELU than the one that they were trained with."""
    _refuse_bidirectional(fields)
    config = read_common(fields, replace(DEFAULTS, num_kv_heads=16), (*ACTIVATIONS, "gelu"))
    bias = fields.flag("attention_bias")
    return replace(config, qkv_bias=bias, output_bias=bias)


class GemmaLayer(DecoderLayer):
    """Gemma's, and VaultGemma's.

    Args:
        mlp_norm: the name of the norm before the MLP.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, *, mlp_norm: str) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, _norms(config)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias))
        self.mlp_norm = RMSNorm(source, f"{at}.{mlp_norm}", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size), activation="gelu_tanh")

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


def compose_gemma1(config: ModelConfig, source: WeightSource) -> Network:
    layer = functools.partial(GemmaLayer, config, source, mlp_norm="post_attention_layernorm")
    return read_network(config, source, layer, _ends(config, source), _norms(config))


def compose_vault(config: ModelConfig, source: WeightSource) -> Network:
    layer = functools.partial(GemmaLayer, config, source, mlp_norm="pre_feedforward_layernorm")
    return read_network(config, source, layer, _ends(config, source), _norms(config))


def configure(fields: Fields) -> ModelConfig:
    """Also VaultGemma's."""
    config = read_common(fields, DEFAULTS, ACTIVATIONS)
    bias, num_layers = fields.flag("attention_bias"), config.num_layers
    _refuse_bidirectional(fields)
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(fields, "final_logit_softcapping", 30.0),
        windows=read_layer_types(fields, read_window(fields), ((SLIDING, FULL) * num_layers)[:num_layers]),
        qkv_bias=bias,
        output_bias=bias,
    )


def _refuse_bidirectional(fields: Fields) -> None:
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is true, which is not supported")


def _cap(fields: Fields, name: str, default: float) -> float:
    """0, for none, where the file has a null."""
    return 0.0 if fields.is_null(name) else fields.number(name, default=default)


class Gemma2Layer(DecoderLayer):
    """Also Gemma 3's, with norms of queries and keys."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, _norms(config)
        options = AttentionOptions(config.qkv_bias, config.output_bias, norms if config.qk_norm else None)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.attention_post_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp_norm = RMSNorm(source, f"{at}.pre_feedforward_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size), activation="gelu_tanh")
        self.mlp_post_norm = RMSNorm(source, f"{at}.post_feedforward_layernorm", hidden, norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(self.attention_norm(h), step))
        h += self.mlp_post_norm(self.mlp(self.mlp_norm(h)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer = functools.partial(Gemma2Layer, config, source)
    return read_network(config, source, layer, _ends(config, source), _norms(config))


def _ends(config: ModelConfig, source: WeightSource) -> EndOptions:
    scale = torch.tensor(config.hidden_size**0.5, dtype=source.dtype).item()  # rounded, as the models were trained
    return EndOptions(config.tie_word_embeddings, scale, config.logit_soft_cap)


def _norms(config: ModelConfig) -> NormOptions:
    return NormOptions(config.norm_eps, offset=1.0)


GEMMA3_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
TEXT_DEFAULTS = {  # of a config for images and text, which leaves out what is as in the smallest such model
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131_072}


def configure_gemma3(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    pattern = fields.integer("sliding_window_pattern", default=6)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    is_causal = not fields.flag("use_bidirectional_attention")
    window = read_window(fields)
    if window and not is_causal:
        window = window // 2 + 1  # on either side: the config counts both
    windows = read_layer_types(fields, window, kinds)
    ropes = read_ropes(fields, {FULL: fields.number("rope_theta", default=GEMMA3_THETA),
                                SLIDING: fields.number("rope_local_base_freq", default=LOCAL_THETA)})
    fields.refuse(("attn_logit_softcapping",), "is set, which this family does not compute")
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, DEFAULTS, ACTIVATIONS, [ropes[kind] for kind in kinds]),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        logit_soft_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
        windows=windows,
        is_causal=is_causal,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def configure_gemma3_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text: prompts are text."""
    return configure_gemma3(text_part(fields, TEXT_DEFAULTS))

"""LFM2 (Liquid AI, 2025): short convolutions in place of attention in most layers, norms of queries and keys in the
others, and names of its own.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import ConvolutionShape
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.short_convolution import ShortConvolution
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_state_layers,
)
from slotwise.compute.model.network import MLP, Network, TokenMixer, read_network

CONV = "conv"  # of `layer_types`
PARTS = ("w1", "w3", "w2")  # gate, what it gates, and down


def configure(fields: Fields) -> ModelConfig:
    return replace(read_hybrid(fields), intermediate_size=_read_intermediate_size(fields))


def read_hybrid(fields: Fields) -> ModelConfig:
    """All of a config but its MLPs."""
    tied = "tie_embedding" if fields.has("tie_embedding") else "tie_word_embeddings"
    defaults = ConfigDefaults(num_kv_heads=8, rope_theta=1e6, tie_word_embeddings=True)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    full = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else range(num_layers)
    states = read_state_layers(fields, [FULL if layer in full else CONV for layer in range(num_layers)],
                               kinds=(CONV, FULL))
    sized = Fields({"intermediate_size": 12288, **fields.values}, fields.where)
    config = read_common(sized, defaults)
    shape = ConvolutionShape(config.hidden_size, fields.integer("conv_L_cache", default=3, minimum=2, maximum=64))
    recurrent = RecurrentConfig(shape, states, has_bias=fields.flag("conv_bias"))
    return replace(
        config, qk_norm=True, norm_eps=fields.number("norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag(tied, default=True), recurrent=recurrent if any(states) else None)


def _read_intermediate_size(fields: Fields) -> int:
    """The size between an MLP's products: two thirds of the one that is written, unless a config says otherwise."""
    name = "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size"
    size = fields.integer(name, default=12288)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size, unit = int(2 * size / 3), fields.integer("block_multiple_of", default=256)
    if fields.is_null("block_ffn_dim_multiplier"):
        return size
    return -(-int(fields.number("block_ffn_dim_multiplier", default=1.0) * size) // unit) * unit


class Lfm2Layer(LlamaLayer):
    """Llama's layer under other names, with a short convolution in place of attention in most layers."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        self.attention_norm = RMSNorm(source, f"{at}.operator_norm", hidden, norms)
        if config.recurrent is not None and config.has_state(index):
            assert isinstance(config.recurrent.shape, ConvolutionShape)
            self.attention = ShortConvolution(
                source, f"{at}.conv", config.recurrent.shape, hidden, bias=config.recurrent.has_bias)
        else:
            options = AttentionOptions(
                qk_norm=norms, names=("q_proj", "k_proj", "v_proj", "out_proj"),
                norm_names=("q_layernorm", "k_layernorm"))
            self.attention = Attention(
                source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm = RMSNorm(source, f"{at}.ffn_norm", hidden, norms)
        self.mlp: MLP = self.read_mlp(config, source, index)

    def read_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(source, f"model.layers.{index}.feed_forward", sizes, names=PARTS)


def compose(config: ModelConfig, source: WeightSource, layer: type[Lfm2Layer] = Lfm2Layer) -> Network:
    ends = EndOptions(config.tie_word_embeddings)
    return read_network(config, source, functools.partial(layer, config, source), ends, NormOptions(config.norm_eps))

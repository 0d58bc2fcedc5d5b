"""XGLM (Lin et al., 2021): OPT's layer with computed positions, GELU, and a scaled embedding.

CTRL (Keskar et al., 2019) differs in names, and has other frequencies.  BioGPT (Luo et al., 2022) has a table of
positions as OPT.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from slotwise.compute.model.families import opt
from slotwise.compute.model.families.gpt2 import (
    NAMES,
    ClassicLayer,
    Parts,
    compose_layers,
    read_plain,
    table_ends,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
OPTIONS = AttentionOptions(True, True, names=opt.NAMES)
BASE = 10_000.0  # of wavelengths, in tokens


def configure(fields: Fields) -> ModelConfig:
    pad = fields.integer("pad_token_id", default=1, minimum=0)
    fields = fields.renamed({
        "d_model": "hidden_size", "num_layers": "num_hidden_layers", "ffn_dim": "intermediate_size",
        "attention_heads": "num_attention_heads"})
    if fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "is true: only decoders are supported")
    config = read_plain(fields, DEFAULTS, "gelu", "activation_function")
    padded = -1 if fields.is_null("pad_token_id") else pad - opt.OFFSET
    return _scaled(fields, replace(config, own=padded))


def _scaled(fields: Fields, config: ModelConfig) -> ModelConfig:
    is_scaled = fields.flag("scale_embedding", default=True)
    return replace(config, embedding_scale=math.sqrt(config.hidden_size) if is_scaled else 1.0)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """`config.own` is the position whose row is zeros, if it is one: that of the padding token in the table."""
    size, count, padded = config.hidden_size, config.max_position_embeddings, config.own
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(BASE) / (half - 1)))

    def positions(source: WeightSource) -> Tensor:
        table = sines(source, frequencies, count, opt.OFFSET, size)
        if isinstance(padded, int) and 0 <= padded < count:
            table[padded] = 0
        return table

    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, positions=positions)
    return compose_layers(config, source, ClassicLayer, opt.PARTS, OPTIONS, ends)


def sines(source: WeightSource, frequencies: Tensor, count: int, first: int, size: int) -> Tensor:
    """Sines, then cosines, of `count` positions from `first` on: `[count, size]`."""
    angles = torch.arange(first, first + count).float()[:, None] * frequencies
    table = torch.cat((angles.sin(), angles.cos()), dim=1)
    table = torch.nn.functional.pad(table, (0, size - table.shape[1]))
    return table.to(source.kernels.device, source.dtype)


def configure_biogpt(fields: Fields) -> ModelConfig:
    """`layer_norm_eps` has no effect, as in transformers."""
    return _scaled(fields, read_plain(fields.replaced(norm_eps=None), DEFAULTS, "gelu"))


def compose_biogpt(config: ModelConfig, source: WeightSource) -> Network:
    return compose_layers(config, source, ClassicLayer, opt.PARTS, OPTIONS, table_ends(config, opt.OFFSET))


CTRL_PARTS = Parts("layernorm1", "multi_head_attention", "layernorm2", "ffn.0", "ffn.2")
CTRL_OPTIONS = AttentionOptions(True, True, names=("Wq", "Wk", "Wv", "dense"))
CTRL_EPS = 1e-6  # of the norms in layers


def configure_ctrl(fields: Fields) -> ModelConfig:
    fields = fields.renamed({**NAMES, "dff": "intermediate_size"}).with_defaults(intermediate_size=8192)
    config = read_plain(
        fields.replaced(hidden_act=None), ConfigDefaults(norm_eps=CTRL_EPS, tie_word_embeddings=True), "relu")
    return replace(config, embedding_scale=math.sqrt(config.hidden_size))


def compose_ctrl(config: ModelConfig, source: WeightSource) -> Network:
    size = config.hidden_size
    frequencies = 1 / torch.pow(BASE, torch.arange(0, size, 2).float() / size)
    positions = functools.partial(
        sines, frequencies=frequencies, count=config.max_position_embeddings, first=0, size=size)
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, positions=positions, head_bias=True)
    layer = functools.partial(
        ClassicLayer, config, source, options=CTRL_OPTIONS, norms=LayerNormOptions(CTRL_EPS), parts=CTRL_PARTS)
    return read_network(config, source, layer, ends, LayerNormOptions(config.norm_eps))

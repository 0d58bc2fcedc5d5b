"""GPT (Radford et al., 2018): GPT-2's parts, with norms of sums as in OPT-350m."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families.gpt2 import DEFAULTS, NAMES, PARTS, read_plain, table_ends, with_inner
from slotwise.compute.model.families.opt import SumNormLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network, read_network

APPROXIMATE = "gelu"  # transformers computes the approximation by this name


def configure(fields: Fields) -> ModelConfig:
    config = read_plain(with_inner(fields.renamed(NAMES)), DEFAULTS, APPROXIMATE, "afn")
    return replace(config, activation="gelu_tanh") if config.activation == "gelu" else config


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(True, True, qkv_name="c_attn", names=("", "", "", "c_proj"))
    layer = functools.partial(
        SumNormLayer, config, source, options=options, norms=LayerNormOptions(config.norm_eps), parts=PARTS)
    return read_network(config, source, layer, table_ends(config), None)

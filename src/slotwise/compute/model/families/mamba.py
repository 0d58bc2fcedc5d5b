"""Mamba (Gu and Dao, 2023), and Falcon Mamba (TII, 2024), which norms dt, B and C.  Every layer has a recurrent state,
and there are no MLPs.

    h += mamba(norm(h))
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import SelectiveShape
from slotwise.compute.model.families.mamba2 import read_stateful
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba import Mamba, ReadNorm, WeightlessNorm
from slotwise.compute.model.layers.mlp import NoMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig, RecurrentConfig
from slotwise.compute.model.network import DecoderLayer, Network, read_network


def configure(fields: Fields) -> ModelConfig:
    absent = {"hidden_size": 768, "num_hidden_layers": 32, "tie_word_embeddings": True}
    fields = Fields({**absent, **fields.values}, fields.where)
    config = read_stateful(fields)
    expanded = int(fields.number("expand", default=2.0) * config.hidden_size)
    shape = SelectiveShape(
        fields.integer("intermediate_size", default=expanded),
        fields.integer("state_size", default=16, maximum=1 << 12),
        fields.integer("conv_kernel", default=4, minimum=2, maximum=64),
        read_rank(fields, "time_step_rank", config.hidden_size))
    return replace(config, recurrent=RecurrentConfig(
        shape, (True,) * config.num_layers, has_bias=fields.flag("use_bias"),
        has_convolution_bias=fields.flag("use_conv_bias", default=True)))


def configure_falcon(fields: Fields) -> ModelConfig:
    config = configure(fields)
    assert config.recurrent is not None
    return replace(config, recurrent=replace(config.recurrent, eps=fields.number("mixer_rms_eps", default=1e-6)))


def read_rank(fields: Fields, name: str, hidden_size: int) -> int:
    """The inputs of the product that makes dt: a sixteenth of the hidden size, unless a config says otherwise."""
    if fields.values.get(name) in (None, "auto"):
        return -(-hidden_size // 16)
    return fields.integer(name, maximum=1 << 16)


class MambaLayer(DecoderLayer):
    """One norm, one layer with a state."""

    def __init__(self, config: ModelConfig, source: WeightSource, norm: ReadNorm | None, index: int) -> None:
        at, recurrent = f"model.layers.{index}", config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, SelectiveShape)
        self.attention_norm = RMSNorm(source, f"{at}.norm", config.hidden_size, NormOptions(config.norm_eps))
        self.attention = Mamba(
            source, f"{at}.mixer", recurrent.shape, config.hidden_size, bias=recurrent.has_bias,
            convolution_bias=recurrent.has_convolution_bias, norm=norm)
        self.mlp = NoMLP()

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)


def compose(config: ModelConfig, source: WeightSource, norm: ReadNorm | None = None) -> Network:
    ends, norms = EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps)
    layer = functools.partial(MambaLayer, config, source, norm)
    return read_network(config, source, layer, ends, norms)


def compose_falcon(config: ModelConfig, source: WeightSource) -> Network:
    assert config.recurrent is not None
    options = NormOptions(config.recurrent.eps)
    return compose(config, source, lambda source, name, size: WeightlessNorm(source, size, options))

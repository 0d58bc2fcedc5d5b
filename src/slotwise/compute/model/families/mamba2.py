"""Mamba-2 (Dao and Gu, 2024; Codestral Mamba): every layer is one with a recurrent state, and there are no MLPs.

    h += mamba2(norm(h))
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from slotwise.compute.kernels.interface import StateSpaceShape
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba2 import Mamba2
from slotwise.compute.model.layers.mlp import NoMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import MAX_LAYERS, ModelConfig, RecurrentConfig, read_common
from slotwise.compute.model.network import DecoderLayer, Network, read_network

CONTEXT = 1 << 17  # tokens of the longest sequence, which a state does not bound


def configure(fields: Fields) -> ModelConfig:
    config = read_stateful(fields)
    heads, head_dim = (fields.integer(name, default=size, maximum=1 << 16)
                       for name, size in (("num_heads", 128), ("head_dim", 64)))
    values = int(fields.number("expand", default=2.0) * config.hidden_size)
    if heads * head_dim != values:
        raise fields.error("num_heads", f"({heads}) times head_dim ({head_dim}) must be expand times hidden_size "
                           f"({values})")
    groups = read_groups(fields, "n_groups", heads, 8)
    least, largest = read_step_limit(fields)
    shape = StateSpaceShape(
        heads, head_dim, groups, fields.integer("state_size", default=128, maximum=1 << 12),
        fields.integer("conv_kernel", default=4, maximum=64), groups, least_step=least, largest_step=largest)
    return replace(config, recurrent=RecurrentConfig(
        shape, (True,) * config.num_layers, has_bias=fields.flag("use_bias"),
        has_convolution_bias=fields.flag("use_conv_bias", default=True)))


def read_stateful(fields: Fields) -> ModelConfig:
    """A config without attention and MLPs, whose fields have other names; also Mamba's."""
    values = {"hidden_size": 4096, "num_hidden_layers": 64, "max_position_embeddings": CONTEXT}
    values |= {name: value for name, value in fields.values.items() if value is not None}
    lacking = {"num_attention_heads": 1, "num_key_value_heads": None, "head_dim": 2, "intermediate_size": 1}
    fields = Fields(values | lacking, fields.where)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return replace(read_common(fields, ropes=(NoRope(),) * num_layers),
                   norm_eps=fields.number("layer_norm_epsilon", default=1e-5))


def read_groups(fields: Fields, name: str, heads: int, default: int = 1) -> int:
    """The groups of heads that share B and C.  Raises CheckpointError where they do not divide the heads."""
    groups = fields.integer(name, default=default, maximum=1 << 12)
    if heads % groups:
        raise fields.error(name, f"({groups}) must divide the number of heads ({heads})")
    return groups


INFINITE = {"__float__": "Infinity"}  # as transformers 5 writes it; before, it wrote the bare word


def read_step_limit(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """Bounds of dt, by default none."""
    found = fields.values.get(name)
    if found is None:
        return 0.0, math.inf
    bounds = [math.inf if one == INFINITE else one for one in found] if isinstance(found, list) else []
    if len(bounds) != 2 or not all(
            isinstance(one, (int, float)) and not isinstance(one, bool) and one >= 0 for one in bounds):
        raise fields.error(name, f"must be two numbers of at least 0, not {found!r:.40}")
    return float(bounds[0]), float(bounds[1])


class Mamba2Layer(DecoderLayer):
    """One norm, one layer with a state."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, recurrent = f"model.layers.{index}", config.recurrent
        assert recurrent is not None and isinstance(recurrent.shape, StateSpaceShape)
        self.attention_norm = RMSNorm(source, f"{at}.norm", config.hidden_size, NormOptions(config.norm_eps))
        self.attention = Mamba2(
            source, f"{at}.mixer", recurrent.shape, config.hidden_size, config.norm_eps, bias=recurrent.has_bias,
            convolution_bias=recurrent.has_convolution_bias)
        self.mlp = NoMLP()

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends, norms = EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps)
    return read_network(config, source, functools.partial(Mamba2Layer, config, source), ends, norms)

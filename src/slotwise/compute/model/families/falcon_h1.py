"""Falcon-H1 (TII, 2025): in every layer attention and Mamba-2's layer side by side, and factors for the outputs of most
products (Yang et al., "Tensor Programs V", 2022).

    x = norm(h),  h += attention(x) + mamba2(x),  h += mlp(norm(h))

The factors are multiplied into the weights as these are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import StateSpaceShape
from slotwise.compute.model.families.bamba import read_recurrent
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep, refuse_parts, refuse_ranks
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mamba2 import Mamba2
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import ScaledSource, WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_common
from slotwise.compute.model.network import Network, TokenMixer, read_network

Factors = dict[str, float | Tensor]


@dataclass(frozen=True, slots=True)
class FalconH1Config:
    """The factors, and the bias of the last product of Mamba-2's layer."""

    attention_in: float
    attention_out: float
    key: float
    mlp: tuple[float, float]  # of gates, and of the MLP's outputs
    state_in: float
    state: tuple[float, ...]  # of z, x, B, C and dt
    state_out: float
    output_bias: bool


def configure(fields: Fields) -> ModelConfig:
    config, bias = read_common(fields, ConfigDefaults(num_kv_heads=8, norm_eps=1e-5)), fields.flag("attention_bias")
    nowhere = (False,) * config.num_layers
    sized = fields
    if not fields.is_null("mamba_d_ssm"):  # as many values, whatever mamba_expand says
        values, heads = fields.integer("mamba_d_ssm", default=1024), fields.integer("mamba_n_heads", default=128)
        if values % heads:
            raise fields.error("mamba_d_ssm", f"({values}) must be a multiple of mamba_n_heads ({heads})")
        sized = Fields({**fields.values, "mamba_expand": values / config.hidden_size}, fields.where)
    recurrent = read_recurrent(sized, config, nowhere)
    assert isinstance(recurrent.shape, StateSpaceShape)
    shape = replace(
        recurrent.shape, norm_groups=recurrent.shape.num_groups if fields.flag("mamba_rms_norm") else 0,
        is_normed_first=fields.flag("mamba_norm_before_gate", default=True))
    gate, down = _read_factors(fields, "mlp_multipliers", 2)
    return replace(
        config, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logit_scale=fields.number("lm_head_multiplier", default=1.0),
        recurrent=replace(recurrent, shape=shape, beside=(True,) * config.num_layers),
        own=FalconH1Config(
            fields.number("attention_in_multiplier", default=1.0),
            fields.number("attention_out_multiplier", default=1.0), fields.number("key_multiplier", default=1.0),
            (gate, down), fields.number("ssm_in_multiplier", default=1.0), _read_factors(fields, "ssm_multipliers", 5),
            fields.number("ssm_out_multiplier", default=1.0), fields.flag("projectors_bias")))


def _read_factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    if not fields.has(name):
        return (1.0,) * count
    found = fields.numbers(name)
    if len(found) != count:
        raise fields.error(name, f"must be {count} numbers, not {len(found)}")
    return found


def _factors(config: ModelConfig, at: str) -> Factors:
    """Of the weights and biases of a layer, by name."""
    own, recurrent = config.own, config.recurrent
    assert isinstance(own, FalconH1Config) and recurrent is not None and isinstance(recurrent.shape, StateSpaceShape)
    shape, shared = recurrent.shape, recurrent.shape.num_groups * recurrent.shape.state_size
    sizes = (shape.values, shape.values, shared, shared, shape.num_heads)
    mixed = torch.cat([torch.full((size,), factor) for size, factor in zip(sizes, own.state, strict=True)])
    attention, mamba, mlp = f"{at}.self_attn", f"{at}.mamba", f"{at}.feed_forward"
    of_products: dict[str, tuple[float | Tensor, float | Tensor]] = {  # of the weight, of the bias
        f"{attention}.q_proj": (own.attention_in, 1.0),
        f"{attention}.k_proj": (own.attention_in * own.key, own.key),
        f"{attention}.v_proj": (own.attention_in, 1.0),
        f"{attention}.o_proj": (own.attention_out, own.attention_out),
        f"{mamba}.in_proj": (own.state_in * mixed, mixed),
        f"{mamba}.out_proj": (own.state_out, own.state_out),
        f"{mlp}.gate_proj": (own.mlp[0], own.mlp[0]),
        f"{mlp}.down_proj": (own.mlp[1], own.mlp[1])}
    return {f"{name}.{part}": factor for name, pair in of_products.items()
            for part, factor in zip(("weight", "bias"), pair, strict=True)}


class SideBySide:
    """Attention and a layer with a state over the same inputs, added."""

    def __init__(self, source: WeightSource, attention: Attention, state: Mamba2) -> None:
        self.ropes: tuple[Rope, ...] = attention.ropes
        self._kernels = source.kernels
        self._attention, self._state = attention, state
        self.bytes = attention.bytes + state.bytes

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        assert step.beside is not None
        advanced = self._state(x, step.beside)
        return self._kernels.add(self._attention(x, step), advanced)

    def store(self, x: Tensor, step: LayerStep) -> Tensor:
        assert step.beside is not None
        self._attention.store(x, step)
        return self._state.store(x, step.beside)


class FalconH1Layer(LlamaLayer):
    """Llama's layer with two parts in place of attention."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps)
        own, recurrent, source = config.own, config.recurrent, ScaledSource(source, _factors(config, at))
        assert isinstance(own, FalconH1Config) and recurrent is not None
        assert isinstance(recurrent.shape, StateSpaceShape)
        refuse_ranks(source, "a recurrent state next to attention")
        refuse_parts(source, "weights that the model multiplies by factors")
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        state = Mamba2(
            source, f"{at}.mamba", recurrent.shape, hidden, config.norm_eps, bias=recurrent.has_bias,
            output_bias=own.output_bias, convolution_bias=recurrent.has_convolution_bias)
        attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias))
        self.attention = SideBySide(source, attention, state)
        self.mlp_norm = RMSNorm(source, f"{at}.pre_ff_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.feed_forward", (hidden, config.intermediate_size), bias=config.mlp_bias)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale)
    layer = functools.partial(FalconH1Layer, config, source)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

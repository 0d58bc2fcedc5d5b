"""LFM3 (Liquid AI, 2026): LFM2's layers with norms behind what they compute, too, windows in some, gates for each head,
and a rotary embedding for each kind of attention.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotwise.compute.kernels.interface import ConvolutionShape
from slotwise.compute.model.families import lfm2
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope, ProportionalRope, Rope
from slotwise.compute.model.layers.short_convolution import ShortConvolution
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    RecurrentConfig,
    read_common,
    read_ropes,
    read_window,
    refuse_rope_scaling,
)
from slotwise.compute.model.network import DecoderLayer, Network, TokenMixer, read_network

THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": THETAS[SLIDING]},
    FULL: {"rope_type": "proportional", "rope_theta": THETAS[FULL], "partial_rotary_factor": 0.5}}


@dataclass(frozen=True, slots=True)
class Lfm3Config:
    """What not all of the family have."""

    has_post_norms: bool
    has_gates: bool


def configure(fields: Fields) -> ModelConfig:
    refuse_rope_scaling(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        FULL if layer % 4 == 2 else SLIDING if layer % 4 == 0 and layer else lfm2.CONV for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING, lfm2.CONV}:
        raise fields.error("layer_types", f"must be {FULL}, {SLIDING} or {lfm2.CONV} for each of num_hidden_layers "
                           f"({num_layers})")
    window = read_window(fields, 256)
    if SLIDING in kinds and not window:
        raise fields.error("sliding_window", "is null, but layers have sliding attention")
    by_kind = fields.section("rope_parameters").values or ROPES
    ropes = {kind: _rope(fields, kind, by_kind) for kind in THETAS if kind in kinds}
    bias = fields.flag("attention_bias")
    plain = fields.replaced(rope_parameters=None).with_defaults(intermediate_size=7680)
    config = read_common(
        plain, ConfigDefaults(num_kv_heads=4, head_dim=128, tie_word_embeddings=True),
        ropes=[ropes.get(kind, NoRope()) for kind in kinds])
    shape = ConvolutionShape(config.hidden_size, fields.integer("conv_L_cache", default=7, minimum=2, maximum=64))
    states = tuple(kind == lfm2.CONV for kind in kinds)
    return replace(
        config, qkv_bias=bias, output_bias=bias, qk_norm=True, norm_eps=fields.number("norm_eps", default=1e-5),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        recurrent=RecurrentConfig(shape, states, has_bias=fields.flag("conv_bias")) if any(states) else None,
        own=Lfm3Config(fields.flag("use_sandwich_norm", default=True), fields.flag("use_attention_gate", default=True)))


def _rope(fields: Fields, kind: str, by_kind: Mapping[str, Any]) -> Rope:
    scaling = Fields(by_kind.get(kind) or {}, f"{fields.where}, rope_parameters")
    if scaling.text("rope_type", default="default") != "proportional":
        return read_ropes(fields.replaced(rope_parameters={kind: dict(scaling.values)}), {kind: THETAS[kind]})[kind]
    proportion = scaling.number("partial_rotary_factor", default=1.0)
    if proportion > 1:
        raise scaling.error("partial_rotary_factor", f"must be at most 1, not {proportion:g}")
    return ProportionalRope(scaling.number("rope_theta", default=THETAS[kind]), proportion,
                            scaling.number("factor", default=1.0))


class Lfm3Layer(DecoderLayer):
    """A short convolution or attention, and an MLP."""

    attention: TokenMixer
    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, own = f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps), config.own
        assert isinstance(own, Lfm3Config)
        self.attention_norm = RMSNorm(source, f"{at}.operator_norm", hidden, norms)
        if config.recurrent is not None and config.has_state(index):
            assert isinstance(config.recurrent.shape, ConvolutionShape)
            self.attention = ShortConvolution(
                source, f"{at}.conv", config.recurrent.shape, hidden, bias=config.recurrent.has_bias)
        else:
            options = AttentionOptions(config.qkv_bias, config.output_bias, norms, is_gated=own.has_gates,
                                       gate_name="gate_proj" if own.has_gates else "", has_head_gates=own.has_gates)
            self.attention = Attention(
                source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm = RMSNorm(source, f"{at}.ffn_norm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.feed_forward", (hidden, config.intermediate_size), names=lfm2.PARTS)
        self._has_post_norms = own.has_post_norms
        if own.has_post_norms:
            self.attention_post_norm = RMSNorm(source, f"{at}.post_operator_norm", hidden, norms)
            self.mlp_post_norm = RMSNorm(source, f"{at}.post_ffn_norm", hidden, norms)

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        mixed = self.attention(self.attention_norm(h), step)
        h += self.attention_post_norm(mixed) if self._has_post_norms else mixed
        x = self.mlp(self.mlp_norm(h))
        h += self.mlp_post_norm(x) if self._has_post_norms else x


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(Lfm3Layer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

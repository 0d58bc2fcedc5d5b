"""OLMo Hybrid (OLMo Team, 2026): OLMo 3's layer in every fourth place, and in the others a recurrent state by the gated
delta rule, which may change its sign, between norms before state and MLP.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.kernels.interface import DeltaShape
from slotwise.compute.model.families import olmo2
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.gated_delta import OWN_PRODUCTS, GatedDelta
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import NormOptions, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
from slotwise.compute.model.model_config import (
    FULL,
    LINEAR,
    MAX_LAYERS,
    ModelConfig,
    RecurrentConfig,
    read_state_layers,
)
from slotwise.compute.model.network import DecoderLayer, Network, TokenMixer, read_network

NORM_EPS = 1e-5  # of the norm behind the rule, whatever the config says of others


def configure(fields: Fields) -> ModelConfig:
    """Layers rotate only where the config has a base."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    rotates = fields.section("rope_parameters").has("rope_theta") or fields.has("rope_theta")
    ropes = None if rotates else (NoRope(),) * num_layers
    config = olmo2.configure(fields.with_defaults(rms_norm_eps=1e-6).replaced(
        head_dim=None, **{} if rotates else {"rope_parameters": None}), ropes)
    kinds = [LINEAR if (layer + 1) % 4 else FULL for layer in range(num_layers)]
    if FULL not in kinds:
        kinds[-1] = FULL
    states = read_state_layers(fields, kinds)
    if all(states) or not any(states):
        raise fields.error("layer_types", f"must name both {FULL} and {LINEAR}")
    recurrent = RecurrentConfig(_read_shape(fields, config), states, eps=NORM_EPS)
    return replace(config, recurrent=recurrent)


def _read_shape(fields: Fields, config: ModelConfig) -> DeltaShape:
    keys, values = (fields.integer(f"linear_num_{part}_heads", default=config.num_heads, maximum=1 << 12)
                    for part in ("key", "value"))
    if values % keys:
        raise fields.error("linear_num_value_heads", f"({values}) must be a multiple of linear_num_key_heads ({keys})")
    size = fields.integer("linear_key_head_dim", default=int(0.75 * config.hidden_size / keys), maximum=1 << 12)
    return DeltaShape(
        keys, values, size, fields.integer("linear_value_head_dim", default=2 * size, maximum=1 << 12),
        fields.integer("linear_conv_kernel_dim", default=4, maximum=64),
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0)


class StateLayer(LlamaLayer):
    """Llama's layer with a recurrent state."""

    attention: TokenMixer

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, norms, recurrent = (
            f"model.layers.{index}", config.hidden_size, NormOptions(config.norm_eps), config.recurrent)
        assert recurrent is not None and isinstance(recurrent.shape, DeltaShape)
        self.attention_norm = RMSNorm(source, f"{at}.input_layernorm", hidden, norms)
        self.attention = GatedDelta(
            source, f"{at}.linear_attn", recurrent.shape, hidden, recurrent.eps, names=OWN_PRODUCTS)
        self.mlp_norm = RMSNorm(source, f"{at}.post_attention_layernorm", hidden, norms)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size))


def _read_layer(config: ModelConfig, source: WeightSource, index: int) -> DecoderLayer:
    if config.has_state(index):
        return StateLayer(config, source, index)
    return olmo2.Olmo2Layer(config, source, index, norms_all_heads=True)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(_read_layer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

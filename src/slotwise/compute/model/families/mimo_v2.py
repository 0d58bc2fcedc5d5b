"""MiMo-V2-Flash (Xiaomi, 2025): Llama with values smaller than keys and a third of each head rotated; most layers have
windows, sinks and more key heads, and layers after the first have DeepSeek-V3's experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families.glm4_moe import NAMES
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import NormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_grouped_mixture,
    read_layer_types,
    read_ropes,
    read_window,
)
from slotwise.compute.model.network import Network, read_experts, read_network

HEAD_DIM, VALUE_DIM, TURNING = 192, 128, 0.334
THETAS = {FULL: 5_000_000.0, SLIDING: 10_000.0}


@dataclass(frozen=True, slots=True)
class MiMoConfig:
    """Options that only this family has."""

    value_dim: int
    value_scale: float
    has_sinks: tuple[bool, ...]  # by layer


def configure(fields: Fields) -> ModelConfig:
    """Also accepts published configs, which have other fields for layers and rotary embeddings than `transformers`."""
    fields = _as_in_transformers(fields).with_defaults(head_dim=HEAD_DIM)
    num_layers, head_dim = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("head_dim")
    kinds = fields.texts("layer_types") if fields.has("layer_types") else [
        SLIDING if layer and (layer + 1) % 6 else FULL for layer in range(num_layers)]
    windows, bias = read_layer_types(fields, read_window(fields, 128), kinds), fields.flag("attention_bias")
    ropes = read_ropes(fields, THETAS, head_dim)
    config = read_common(
        fields.replaced(rope_parameters=None), ConfigDefaults(num_kv_heads=4, norm_eps=1e-5),
        ropes=[ropes[kind] for kind in kinds])
    more = fields.integer("swa_num_key_value_heads", default=2 * config.num_kv_heads, maximum=1 << 12)
    if config.num_heads % more:
        raise fields.error("num_attention_heads", f"({config.num_heads}) must be a multiple of the {more} heads of "
                           "keys of layers with windows")
    routing = Routing(256, 8, is_normalized=True)
    mixture = read_grouped_mixture(fields, num_layers, routing, intermediate_size=2048, num_shared=0)
    value_dim = fields.integer("v_head_dim", default=VALUE_DIM, maximum=head_dim)
    scale = 1.0 if fields.is_null("attention_value_scale") else fields.number("attention_value_scale", default=0.707)
    return replace(
        config, qkv_bias=bias, windows=windows, mixture=mixture,
        layer_heads=tuple((more if window else config.num_kv_heads, head_dim) for window in windows),
        own=MiMoConfig(value_dim, scale, tuple(window > 0 for window in windows)))


def _as_in_transformers(fields: Fields) -> Fields:
    """Renames the fields of published configs as in `transformers`."""
    pattern, frequency = "hybrid_layer_pattern", "moe_layer_freq"
    found = fields.renamed({"layernorm_epsilon": "rms_norm_eps"}) if fields.has("layernorm_epsilon") else fields
    if found.has(pattern) and not found.has("layer_types"):
        found = found.with_defaults(layer_types=[SLIDING if each else FULL for each in found.integers(pattern)])
    if isinstance(found.values.get(frequency), list):
        kinds = ["sparse" if each else "dense" for each in found.integers(frequency)]
        found = found.with_defaults(mlp_layer_types=kinds)
    share = found.number("partial_rotary_factor", default=TURNING)
    by_kind = found.section("rope_parameters")
    if not any(isinstance(value, dict) for value in by_kind.values.values()):
        found.refuse(("rope_scaling",), "is set, which is not supported in this architecture")
        bases = {FULL: by_kind.number("rope_theta", default=found.number("rope_theta", default=THETAS[FULL])),
                 SLIDING: found.number("swa_rope_theta", default=THETAS[SLIDING])}
        by_kind = Fields({kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}, "")
    turning = {kind: {"partial_rotary_factor": share, **rope} for kind, rope in by_kind.values.items()
               if isinstance(rope, dict)}
    for name in ("swa_head_dim", "swa_v_head_dim", "swa_num_attention_heads"):
        same = name.removeprefix("swa_")
        if found.has(name) and found.values[name] != found.values.get(same):
            raise found.error(name, f"must be {same}: layers with windows differ in heads of keys alone")
    if found.flag("add_full_attention_sink_bias"):
        raise found.error("add_full_attention_sink_bias", "is true, which is not supported")
    return found.replaced(rope_parameters=turning)


class MiMoLayer(LlamaLayer):
    """Llama's layer with these values, sinks and experts."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        own = config.own
        assert isinstance(own, MiMoConfig)
        sinks = "attention_sink_bias" if own.has_sinks[index] else ""
        options = AttentionOptions(sinks=sinks, value_dim=own.value_dim, value_scale=own.value_scale)
        super().__init__(config, source, index, functools.partial(read_experts, names=NAMES), options)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    layer, ends = functools.partial(MiMoLayer, config, source), EndOptions(config.tie_word_embeddings)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

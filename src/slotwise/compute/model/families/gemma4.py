"""Gemma 4 (Gemma Team, 2026), text: Gemma 3 with norms of values and per-layer embeddings.

    h += norm(attention(norm(h))),  h += norm(mlp(norm(h)))
    h += per-layer embedding of h
    h *= scalar

Layers with full attention have larger heads, of which a quarter turns, and in larger models values that are keys; the
last layers read the keys and values of earlier ones.  The mixture has experts next to the MLP, chosen by another norm
of the same state:

    h += norm(norm(mlp(norm(h))) + norm(experts(norm(h), router(norm(h)))))
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotwise.compute.kernels.interface import ExpertWeights, Routing
from slotwise.compute.kernels.matrix import StackedMatrix, scaled
from slotwise.compute.model.families.gemma import ACTIVATIONS
from slotwise.compute.model.families.gemma3n import read_attention, read_kv_layers
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import SPLIT, GatedMLP, MixtureOfExperts, separate_experts, stacked_experts
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.per_layer_embedding import PerLayerGate, PerLayerInputs, PerLayerStream
from slotwise.compute.model.layers.rank_weights import WeightSource, expert_share
from slotwise.compute.model.layers.rope import ProportionalRope, Rope
from slotwise.compute.model.model_config import (
    FULL,
    MAX_EXPERTS,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    MixtureConfig,
    ModelConfig,
    read_common,
    read_layer_types,
    read_ropes,
    read_window,
    refuse_rope_scaling,
    text_part,
)
from slotwise.compute.model.network import MLP, DecoderLayer, Network, read_network, refuse_stages

DEFAULTS = ConfigDefaults(num_kv_heads=4, head_dim=256, tie_word_embeddings=True)
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
TEXT_DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "max_position_embeddings": 131_072}


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """What only this family has."""

    intermediate_sizes: tuple[int, ...]  # by layer
    values_are_keys: tuple[bool, ...]  # by layer, before their norms
    input_size: int  # of a per-layer embedding; 0: the model has no such embeddings
    input_vocab_size: int


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % 6 else FULL for layer in range(num_layers))
    kinds = (*kinds[:-1], FULL)  # as transformers
    windows, bias = read_layer_types(fields, read_window(fields, 512), kinds), fields.flag("attention_bias")
    if fields.has("use_bidirectional_attention") and fields.text("use_bidirectional_attention") != "vision":
        raise fields.error("use_bidirectional_attention", "must be null or vision: attention to later tokens of text "
                           "is not supported")
    refuse_rope_scaling(fields)
    fields = Fields({"intermediate_size": 9216, **fields.values}, fields.where)
    values_are_keys, size = fields.flag("attention_k_eq_v"), fields.integer("intermediate_size")
    heads = _layer_heads(fields, kinds, values_are_keys=values_are_keys)
    ropes = tuple(_rope(fields, kind, head_dim) for kind, (_, head_dim) in zip(kinds, heads, strict=True))
    plain = Fields({**fields.values, "per_layer_config": None}, fields.where)
    config, kv_layers = read_common(plain, DEFAULTS, ACTIVATIONS, ropes), read_kv_layers(fields, kinds, 0)
    width = 2 if fields.flag("use_double_wide_mlp") else 1
    inputs = 0 if fields.values.get("hidden_size_per_layer_input") == 0 else fields.integer(
        "hidden_size_per_layer_input", default=256)
    inputs_vocab = fields.integer("vocab_size_per_layer_input", default=262_144)
    if inputs and inputs_vocab < config.vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"({inputs_vocab}) must be at least vocab_size")
    return replace(
        config, qkv_bias=bias, output_bias=bias, qk_norm=True, attention_scale=1.0, windows=windows, layer_heads=heads,
        logit_soft_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
        intermediate_size=size * (width if kv_layers else 1), kv_layers=kv_layers, mixture=_mixture(fields, config),
        own=Gemma4Config(
            tuple(size * (width if kv_layers and kv_layers[layer] != layer else 1) for layer in range(num_layers)),
            tuple(values_are_keys and kind == FULL for kind in kinds), inputs, inputs_vocab))


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images, sound and text: prompts are text."""
    return configure(text_part(fields, TEXT_DEFAULTS))


UNIFIED = {
    "hidden_size_per_layer_input": 0, "enable_moe_block": False, "sliding_window": 1024,
    "max_position_embeddings": 262_144}


def configure_unified(fields: Fields) -> ModelConfig:
    """Gemma 4's text model for images and sound without encoders: without experts and per-layer embeddings."""
    fields.refuse(("num_experts",), "is set, which this family does not have")
    return configure(Fields({**fields.with_defaults(**UNIFIED).values, "hidden_size_per_layer_input": 0}, fields.where))


def configure_unified_text(fields: Fields) -> ModelConfig:
    """The text part of it: prompts are text."""
    return configure_unified(text_part(fields, TEXT_DEFAULTS | UNIFIED))


def _layer_heads(fields: Fields, kinds: Iterable[str], *, values_are_keys: bool) -> tuple[tuple[int, int], ...]:
    """By layer, its heads of keys and values and their size."""
    absent = fields.integer("num_attention_heads") if fields.is_null("num_key_value_heads") else 4
    plain = fields.integer("num_key_value_heads", default=absent), fields.integer("head_dim", default=256)
    name = "per_layer_config"
    if fields.has(name):
        section = fields.section(name)
        if not all(key.isascii() and key.isdecimal() for key in section.values):
            raise fields.error(name, "must name layers by their numbers")
        by_layer = {int(key): section.section(key) for key in section.values}
        return tuple(_own_heads(fields, by_layer.get(layer, Fields({}, "")), plain) for layer, _ in enumerate(kinds))
    full = plain[0], fields.integer("global_head_dim", default=512)
    if values_are_keys:
        full = fields.integer("num_global_key_value_heads", default=plain[0]), full[1]
    return tuple(full if kind == FULL else plain for kind in kinds)


def _own_heads(fields: Fields, own: Fields, plain: tuple[int, int]) -> tuple[int, int]:
    unknown = set(own.values) - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise fields.error("per_layer_config", f"has {min(unknown)!r:.40}, which is not supported")
    heads = own.integer("num_key_value_heads", default=plain[0]), own.integer("head_dim", default=plain[1])
    if heads[1] % 2 or fields.integer("num_attention_heads") % heads[0]:
        raise fields.error("per_layer_config", f"gives a layer {heads[0]} heads of keys of size {heads[1]}, which do "
                           "not fit its heads of queries")
    return heads


def _rope(fields: Fields, kind: str, head_dim: int) -> Rope:
    by_kind = fields.section("rope_parameters")
    scaling = by_kind.section(kind).values or (PROPORTIONAL if kind == FULL and not by_kind.values else {})
    if scaling.get("rope_type") != "proportional":
        only = Fields({**fields.values, "rope_scaling": None, "rope_parameters": {kind: scaling}}, fields.where)
        return replace(read_ropes(only, {kind: THETAS[kind]})[kind], head_dim=head_dim)
    rope = Fields(scaling, f"{fields.where}, rope_parameters")
    proportion = rope.number("partial_rotary_factor", default=1.0)
    if proportion > 1:
        raise rope.error("partial_rotary_factor", f"must be at most 1, not {proportion:g}")
    return ProportionalRope(rope.number("rope_theta", default=THETAS[kind]), proportion,
                            rope.number("factor", default=1.0), head_dim=head_dim)


def _mixture(fields: Fields, config: ModelConfig) -> MixtureConfig | None:
    if not fields.flag("enable_moe_block"):
        return None
    count = fields.integer("num_experts", maximum=MAX_EXPERTS)
    routing = Routing(count, fields.integer("top_k_experts", maximum=count), is_normalized=True)
    return MixtureConfig(routing, fields.integer("moe_intermediate_size"), (True,) * config.num_layers,
                         config.intermediate_size, "gelu_tanh")


class Experts(MixtureOfExperts):
    """Experts whose router reads another norm of the state than they do."""

    def routed(self, x: Tensor, router_input: Tensor) -> Tensor:
        return self._reduce(self._experts(x, self._router(router_input)))


def _read_experts(config: ModelConfig, source: WeightSource, at: str) -> Experts:
    mixture = config.mixture_of_experts
    sizes, count = (config.hidden_size, mixture.intermediate_size), mixture.routing.num_experts
    router = Linear(source, {f"{at}.router.proj": count}, config.hidden_size, is_exact=True)
    scales = source.tensor({f"{at}.router.per_expert_scale": (count,)})
    names = f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
    weights = _scaled(
        separate_experts(source, f"{at}.experts", SPLIT, sizes, count) if mixture.are_split else
        stacked_experts(source, names, sizes, count), scales, expert_share(count, source.group))
    return Experts(router, weights, sizes, mixture.routing, source, activation=mixture.activation)


def _scaled(weights: Iterable[ExpertWeights], scales: Tensor, held: range | None) -> Iterator[ExpertWeights]:
    """Experts whose results are multiplied by their scales."""
    for number, each in zip(range(len(scales)) if held is None else held, weights, strict=True):
        down, scale = each.down, scales[number]
        assert not isinstance(down, StackedMatrix)  # of one weight
        yield each._replace(down=down * scale if isinstance(down, Tensor) else scaled(down, scale))


class ScaledNorm(RMSNorm):
    """The norm before a router: its weight is `scale`, over the root of the size."""

    def __init__(self, source: WeightSource, name: str, size: int, options: NormOptions) -> None:
        self._kernels, self._options = source.kernels, options
        self._weight = source.tensor({name: (size,)}) * size**-0.5
        self.bytes = size * source.dtype.itemsize


class Gemma4Layer(DecoderLayer):
    """One layer, with or without experts and per-layer embedding."""

    live_states = 6

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        own, at, hidden = own_of(config), f"model.layers.{index}", config.hidden_size
        norms = NormOptions(config.norm_eps)

        def read_norm(name: str) -> RMSNorm:
            return RMSNorm(source, f"{at}.{name}", hidden, norms)

        self._index, self._kernels = index, source.kernels
        self.attention_norm = read_norm("input_layernorm")
        self.attention = read_attention(config, source, index, norms, has_values=not own.values_are_keys[index])
        self.attention_post_norm = read_norm("post_attention_layernorm")
        self.mlp_norm = read_norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, own.intermediate_sizes[index]), activation="gelu_tanh")
        self.mlp_post_norm = read_norm("post_feedforward_layernorm")
        self._has_experts = config.mixture is not None
        if self._has_experts:
            self.experts = _read_experts(config, source, at)
            self.router_norm = ScaledNorm(source, f"{at}.router.scale", hidden, norms)
            self.dense_post_norm = read_norm("post_feedforward_layernorm_1")
            self.experts_norm = read_norm("pre_feedforward_layernorm_2")
            self.experts_post_norm = read_norm("post_feedforward_layernorm_2")
        self._has_inputs = own.input_size > 0
        if self._has_inputs:
            self.gate = PerLayerGate(source, at, (hidden, own.input_size), norms)
        self._scales = config.mixture_of_experts.routing.num_experts if self._has_experts else 0
        self._scalar = source.tensor({f"{at}.layer_scalar": (1,)})

    @property
    def mlps(self) -> tuple[MLP, ...]:
        return (self.mlp, self.experts) if self._has_experts else (self.mlp,)

    @property
    def bytes(self) -> int:
        """Bytes of the weights, as packed."""
        return super().bytes + self._scalar.nbytes + self._scales * self._scalar.itemsize

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(self.attention_norm(h), step))
        x = h.sum()
        out = self.mlp(self.mlp_norm(x))
        if self._has_experts:
            routed = self.experts.routed(self.experts_norm(x), self.router_norm(x))
            out = self._kernels.rowwise(torch.add, self.dense_post_norm(out), self.experts_post_norm(routed))
        h += self.mlp_post_norm(out)
        if self._has_inputs:
            assert isinstance(h, PerLayerStream)
            h += self.gate(h.sum(), h.inputs(self._index))
        h.replace(self._kernels.rowwise(functools.partial(torch.mul, self._scalar), h.sum()))


class Start:
    """The embedding, and the inputs of all layers."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        own = own_of(config)
        sizes = config.hidden_size, config.num_layers, own.input_size
        self._kernels = source.kernels
        self._inputs = PerLayerInputs(source, own.input_vocab_size, sizes, NormOptions(config.norm_eps))
        self.bytes, self.token_bytes = self._inputs.bytes, self._inputs.token_bytes

    def __call__(self, token_ids: Tensor, x: Tensor) -> PerLayerStream:
        inputs = self._inputs(token_ids, x)
        return PerLayerStream(x, inputs, self._inputs.size, self._kernels)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    scale = torch.tensor(config.hidden_size**0.5, dtype=source.dtype).item()  # rounded, as the models were trained
    ends, norms = EndOptions(config.tie_word_embeddings, scale, config.logit_soft_cap), NormOptions(config.norm_eps)
    if config.kv_layers:
        refuse_stages(source, "attention to the keys and values of another layer")
    network = read_network(config, source, functools.partial(Gemma4Layer, config, source), ends, norms)
    if not own_of(config).input_size:
        return network
    refuse_stages(source, "an embedding of every layer")
    return replace(network, start=Start(config, source))


def own_of(config: ModelConfig) -> Gemma4Config:
    assert isinstance(config.own, Gemma4Config)
    return config.own

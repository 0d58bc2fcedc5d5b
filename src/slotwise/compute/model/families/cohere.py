"""Command R (Cohere, 2024): attention and MLP read the same LayerNorm without a bias, and neighbors rotate.

    h += attention(norm(h)) + down(silu(gate(norm(h))) * up(norm(h)))

Command R7B and A (Cohere 2, 2024) have a window in three of four layers, and no positions in the fourth.  Command A+
(Cohere 2 MoE, 2026) has experts next to attention, whose sum with the shared ones is halved.  Compass (2026) says for
each kind of layer whether and how it rotates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch import Tensor

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import HeadNormOptions, LayerNormOptions, Norm, NormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import NoRope
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
    read_mlp_layers,
    read_ropes,
    read_routing,
    read_window,
    refuse_rope_scaling,
)
from slotwise.compute.model.network import MLP, DecoderLayer, ExpertNames, Network, read_experts, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True)


def configure(fields: Fields, defaults: ConfigDefaults = DEFAULTS) -> ModelConfig:
    fields = fields.renamed({"layer_norm_eps": "rms_norm_eps"})
    config, bias = read_common(fields, defaults), fields.flag("attention_bias")
    return replace(
        config, ropes=tuple(replace(rope, has_neighbors=True) for rope in config.ropes), qkv_bias=bias,
        output_bias=bias, qk_norm=fields.flag("use_qk_norm"),
        logit_scale=fields.number("logit_scale", default=0.0625), is_parallel=True)


def configure_cohere2(fields: Fields) -> ModelConfig:
    config = configure(fields, replace(DEFAULTS, rope_theta=10_000.0))
    windows = read_layer_types(fields, read_window(fields), _kinds(fields, config.num_layers))
    ropes = tuple(rope if window else NoRope() for rope, window in zip(config.ropes, windows, strict=True))
    return replace(config, windows=windows, ropes=ropes, qk_norm=False)


def _kinds(fields: Fields, num_layers: int, first: int = 0) -> list[str]:
    """The kinds of layers by `sliding_window_pattern`, which begins with layer `first`."""
    every = fields.integer("sliding_window_pattern", default=4)
    return [SLIDING if (layer - first + 1) % every else FULL for layer in range(first, num_layers)]


def configure_compass(fields: Fields) -> ModelConfig:
    """`rope_parameters` has an object for each kind of layer, or null where it does not rotate."""
    refuse_rope_scaling(fields)
    by_kind = fields.section("rope_parameters")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else (FULL,) * num_layers
    windows = read_layer_types(fields, read_window(fields), kinds)
    turning = {kind: value for kind, value in by_kind.values.items() if value is not None}
    for kind in set(kinds) - set(by_kind.values):
        raise fields.error("rope_parameters", f"must have an object, or null, for {kind}")
    ropes = read_ropes(fields.replaced(rope_parameters=turning), dict.fromkeys(turning, 10_000.0))
    config = configure(fields.replaced(rope_parameters=None).with_defaults(logit_scale=1.0))
    return replace(config, windows=windows, ropes=tuple(ropes.get(kind, NoRope()) for kind in kinds), qk_norm=False)


@dataclass(frozen=True, slots=True)
class CohereMoeConfig:
    """What only the mixture has."""

    dense_size: int  # between the products of an MLP
    has_rms_norms: bool
    averages: bool  # experts and shared experts


AVERAGE = "average"


def configure_moe(fields: Fields) -> ModelConfig:
    fields.refuse(("rope_scaling",), "is set, which is not supported here: write rope_parameters")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    dense = fields.integer("first_k_dense_replace", default=0, minimum=0)
    has_rms_norms = fields.has("rms_norm_eps")
    if has_rms_norms:
        fields = fields.replaced(layer_norm_eps=None)
    config = configure(fields.replaced(**{} if has_rms_norms else {"rms_norm_eps": None}).with_defaults(head_dim=128),
                       replace(DEFAULTS, rope_theta=10_000.0))
    before = fields.integer("prefix_dense_sliding_window_pattern", default=1)
    kinds = [SLIDING if (layer + 1) % before else FULL for layer in range(min(dense, num_layers))]
    windows = read_layer_types(fields, read_window(fields), [*kinds, *_kinds(fields, num_layers, len(kinds))])
    layers = read_mlp_layers(fields, num_layers, 0)
    ropes = tuple(
        rope if window or (before == 1 and not is_sparse) else NoRope()
        for rope, window, is_sparse in zip(config.ropes, windows, layers, strict=True))
    scoring = fields.text("expert_selection_fn", default="softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.error("expert_selection_fn", f"must be softmax or sigmoid, not {scoring!r:.40}")
    strategy = fields.text("shared_expert_combination_strategy", default=AVERAGE)
    if strategy not in (AVERAGE, "sum"):
        raise fields.error("shared_expert_combination_strategy", f"must be average or sum, not {strategy!r:.40}")
    shared = fields.integer("num_shared_experts", default=0, minimum=0, maximum=MAX_EXPERTS)
    averages = strategy == AVERAGE and shared > 0
    routing = read_routing(fields, Routing(
        8, 2, is_normalized=scoring == "softmax" or fields.flag("norm_topk_prob", default=True),
        scoring="sigmoid" if scoring == "sigmoid" else "softmax"))
    size = config.intermediate_size
    own = CohereMoeConfig(fields.integer("prefix_dense_intermediate_size", default=size), has_rms_norms, averages)
    return replace(
        config, windows=windows, ropes=ropes, qk_norm=False, own=own, intermediate_size=own.dense_size,
        mixture=MixtureConfig(routing, size, layers, shared * size))


class Halved:
    """Half of what `mlp` computes: experts and shared ones are averaged."""

    def __init__(self, source: WeightSource, mlp: MLP) -> None:
        self._kernels, self.mlp = source.kernels, mlp
        self.bytes, self.token_bytes = mlp.bytes, mlp.token_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rowwise(_half, self.mlp(x))


def _half(x: Tensor) -> Tensor:
    return x * 0.5


class CohereLayer(DecoderLayer):
    """Attention and MLP read the same norm."""

    live_states = 4
    mlp: MLP

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        at, hidden, eps = f"model.layers.{index}", config.hidden_size, config.norm_eps
        heads = HeadNormOptions(eps, ("q_norm", "k_norm"), stored="stacked") if config.qk_norm else None
        self.attention_norm: Norm = _norms(config).read(source, f"{at}.input_layernorm", hidden)
        self.attention = Attention(
            source, f"{at}.self_attn", config.attention_shape(index), config.ropes[index], hidden,
            AttentionOptions(config.qkv_bias, config.output_bias, head_norm=heads))
        if config.has_experts(index):
            assert isinstance(config.own, CohereMoeConfig)
            self.mlp = read_experts(config, source, at, ExpertNames(shared="mlp.shared_experts"))
            if config.own.averages:
                self.mlp = Halved(source, self.mlp)
        else:
            self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x = self.attention_norm(h)
        h += self.attention(x, step)
        h += self.mlp(step.kept(x))


def _norms(config: ModelConfig) -> NormOptions | LayerNormOptions:
    if isinstance(config.own, CohereMoeConfig) and config.own.has_rms_norms:
        return NormOptions(config.norm_eps)
    return LayerNormOptions(config.norm_eps, has_bias=False)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    """Also Cohere 2's, with and without experts, and Compass's."""
    ends = EndOptions(config.tie_word_embeddings, logit_scale=config.logit_scale)
    layer = functools.partial(CohereLayer, config, source)
    return read_network(config, source, layer, ends, _norms(config))

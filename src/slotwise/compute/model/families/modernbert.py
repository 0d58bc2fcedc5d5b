"""ModernBERT (Warner et al., 2024): norms before attention and MLP, rotary positions, gated MLPs, and a window on each
side in two of three layers.

    h = norm(embedding(tokens))
    h += attention(norm(h)),  h += down(gelu(gate(norm(h))) * up(norm(h)))      the first layer has one norm
    labels = classifier(norm(gelu(dense(pooled))))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from slotwise.compute.model.families.bert import OTHERS
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import Attention, AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import HEAD_ACTIVATIONS, EndOptions, PooledHead
from slotwise.compute.model.layers.linear import Linear
from slotwise.compute.model.layers.mlp import GatedMLP
from slotwise.compute.model.layers.norm import LayerNormOptions, NoNorm, Norm, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigDefaults,
    ModelConfig,
    read_activation,
    read_common,
    read_layer_types,
    read_ropes,
)
from slotwise.compute.model.network import DecoderLayer, Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0


@dataclass(frozen=True, slots=True)
class ModernBertOptions:
    """What only ModernBERT has."""

    norm_bias: bool
    classifier_bias: bool
    classifier_activation: str


def configure(fields: Fields) -> ModelConfig:
    fields = fields.replaced(**OTHERS).renamed({"norm_eps": "rms_norm_eps"})
    every = fields.integer("global_attn_every_n_layers", default=3)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if layer % every else FULL for layer in range(fields.integer("num_hidden_layers", maximum=MAX_LAYERS)))
    half = fields.integer("sliding_window", default=fields.integer("local_attention", default=128, minimum=2) // 2)
    window = half + 1  # on either side, with the token itself
    if scaling := fields.section("rope_scaling").values:  # of all layers
        by_kind = fields.section("rope_parameters")
        fields = fields.replaced(rope_scaling=None, rope_parameters={
            kind: {**by_kind.section(kind).values, **scaling} for kind in (FULL, SLIDING)})
    ropes = read_ropes(fields, {FULL: fields.number("global_rope_theta", default=GLOBAL_THETA),
                                SLIDING: fields.number("local_rope_theta", default=LOCAL_THETA)})
    windows = read_layer_types(fields, window, kinds)
    activation = fields.text("classifier_activation", default="gelu")
    if activation not in HEAD_ACTIVATIONS:
        raise fields.error("classifier_activation", f"{activation!r:.40} is not supported; these are: "
                           f"{', '.join(filter(None, HEAD_ACTIVATIONS))}")
    options = ModernBertOptions(fields.flag("norm_bias"), fields.flag("classifier_bias"), activation)
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, DEFAULTS, (), [ropes[kind] for kind in kinds]), is_causal=False, windows=windows,
        activation=read_activation(fields, "gelu", "hidden_activation"), qkv_bias=bias, output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"), pooling="cls", own=options)


def _own(config: ModelConfig) -> ModernBertOptions:
    assert isinstance(config.own, ModernBertOptions)
    return config.own


class ModernBertLayer(DecoderLayer):
    """A layer; the first one reads the embedding, which is normed already."""

    def __init__(self, config: ModelConfig, source: WeightSource, index: int, norms: LayerNormOptions) -> None:
        at, hidden = f"model.layers.{index}", config.hidden_size
        options = AttentionOptions(config.qkv_bias, config.output_bias, names=("", "", "", "Wo"), qkv_name="Wqkv")
        self.attention_norm: Norm = norms.read(source, f"{at}.attn_norm", hidden) if index else NoNorm()
        self.attention = Attention(
            source, f"{at}.attn", config.attention_shape(index), config.ropes[index], hidden, options)
        self.mlp_norm: Norm = norms.read(source, f"{at}.mlp_norm", hidden)
        self.mlp = GatedMLP(source, f"{at}.mlp", (hidden, config.intermediate_size), activation=config.activation,
                            bias=config.mlp_bias, is_fused=True, names=("Wi", "Wo"))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp(self.mlp_norm(h))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    own, size = _own(config), config.hidden_size
    norms = LayerNormOptions(config.norm_eps, has_bias=own.norm_bias)
    layer = functools.partial(ModernBertLayer, config, source, norms=norms)
    network = read_network(replace(config, num_labels=0), source, layer, EndOptions(tied=True, norm=norms), norms)
    if not config.num_labels:
        return network
    dense = Linear(source, {"head.dense": size}, size, bias=own.classifier_bias, is_exact=True)
    classifier = Linear(source, {"classifier": config.num_labels}, size, bias=True, is_exact=True)
    return replace(network, classifier=PooledHead(
        (dense, own.classifier_activation), (norms.read(source, "head.norm", size), ""), (classifier, "")))

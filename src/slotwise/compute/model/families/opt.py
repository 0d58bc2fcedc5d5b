"""OPT (Zhang et al., 2022): GPT-2's shape with a table of positions that begins at its third row, and ReLU.

OPT-350m norms sums, not what is added to them, and its embedding is smaller than its hidden states:

    h = norm(h + attention(h)),  h = norm(h + down(relu(up(h))))
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, read_plain, table_ends
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions, LayerStep
from slotwise.compute.model.layers.norm import LayerNormOptions, NoNorm, Norm, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, read_network

DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
OFFSET = 2
PARTS = Parts("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc1", "fc2")
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True, slots=True)
class OPTOptions:
    """What only OPT has."""

    embedding_size: int
    norms_sums: bool
    has_norm_weights: bool
    is_normed: bool  # behind all layers


def configure(fields: Fields) -> ModelConfig:
    fields = fields.renamed({"ffn_dim": "intermediate_size"})
    config, bias = read_plain(fields, DEFAULTS, "relu", "activation_function"), fields.flag("enable_bias", default=True)
    norms_sums = not fields.flag("do_layer_norm_before", default=True)
    options = OPTOptions(
        fields.integer("word_embed_proj_dim", default=config.hidden_size), norms_sums,
        fields.flag("layer_norm_elementwise_affine", default=True),
        not norms_sums and not fields.flag("_remove_final_layer_norm"))
    return replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias, own=options)


class SumNormLayer(ClassicLayer):
    """Norms sums; also GPT's."""

    live_states = 4

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, options: AttentionOptions, norms: LayerNormOptions,
        parts: Parts,
    ) -> None:
        super().__init__(config, source, index, options, norms, parts)
        self.attention_sum_norm, self.attention_norm = self.attention_norm, NoNorm()

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(h.sum(), step)
        _norm(h, self.attention_sum_norm)
        h += self.mlp(h.sum())
        _norm(h, self.mlp_norm)


def _norm(h: ResidualStream, norm: Norm) -> None:
    h.replace(norm(h))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    own = config.own
    assert isinstance(own, OPTOptions)
    norms = LayerNormOptions(config.norm_eps, has_weight=own.has_norm_weights, has_bias=own.has_norm_weights)
    layer = functools.partial(
        SumNormLayer if own.norms_sums else ClassicLayer, config, source,
        options=AttentionOptions(config.qkv_bias, config.output_bias, names=NAMES), norms=norms, parts=PARTS)
    ends = replace(table_ends(config, OFFSET), embedding_size=own.embedding_size)
    return read_network(config, source, layer, ends, norms if own.is_normed else None)

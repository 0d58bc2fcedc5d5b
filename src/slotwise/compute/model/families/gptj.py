"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP read the same normed states, neighbors among a head's first
dimensions rotate, and logits have a bias.

    n = norm(h),  h += attention(n) + down(gelu(up(n)))

CodeGen (Nijkamp et al., 2022) has one weight of queries, values and keys in four groups of heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slotwise.compute.model.families.gpt2 import (
    NAMES,
    ClassicLayer,
    Parts,
    compose_layers,
    read_plain,
    with_inner,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.layers.rope import Rope
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig, read_head_dim
from slotwise.compute.model.network import Network

DEFAULTS = ConfigDefaults(norm_eps=1e-5)
PARTS = Parts("ln_1", "attn", "", "mlp.fc_in", "mlp.fc_out")
GROUPS = 4  # of heads in CodeGen's fused weight


def configure(fields: Fields) -> ModelConfig:
    """Also CodeGen's."""
    fields = with_inner(fields.renamed(NAMES))
    head_dim, rotated = read_head_dim(fields), fields.integer("rotary_dim", default=64)
    if fields.is_null("rotary_dim") or rotated > head_dim or rotated % 2:
        raise fields.error("rotary_dim", f"must be an even number of a head's {head_dim} dimensions")
    share = rotated / head_dim
    if int(head_dim * share) < rotated:  # rounded down
        share = math.nextafter(share, 2.0)
    rope = Rope(10_000.0, share=share, has_neighbors=True)
    config = read_plain(fields, DEFAULTS, "gelu_new", "activation_function", rope)
    return replace(config, qkv_bias=False, output_bias=False)


def configure_codegen(fields: Fields) -> ModelConfig:
    config = configure(fields)
    if config.num_heads % GROUPS:
        raise fields.error("n_head", f"({config.num_heads}) must be a multiple of {GROUPS}")
    return config


class SharedNormLayer(ClassicLayer):
    """Attention and MLP read the same normed states; also other families'."""

    live_states = 4

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x = self.attention_norm(h)
        h += self.attention(x, step)
        h += self.mlp(step.kept(x))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(names=("q_proj", "k_proj", "v_proj", "out_proj"))
    return compose_layers(config, source, SharedNormLayer, PARTS, options, biased_ends(config))


def compose_codegen(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(
        names=("", "", "", "out_proj"), qkv_name="qkv_proj", qkv_groups=GROUPS, values_first=True)
    return compose_layers(config, source, SharedNormLayer, PARTS, options, biased_ends(config))


def biased_ends(config: ModelConfig) -> EndOptions:
    """A head with a bias."""
    return EndOptions(config.tie_word_embeddings, head_bias=True)

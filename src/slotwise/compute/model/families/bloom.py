"""BLOOM (BigScience, 2022): positions by ALiBi, a norm of the embedding, and queries, keys and values in one weight,
head by head.

    h += attention(norm(h)),  h += down(gelu(up(norm(h))))
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, read_plain, with_inner
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers import alibi
from slotwise.compute.model.layers.attention import AttentionOptions, LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import LayerNormOptions, ResidualStream
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, read_network

NAMES = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"}
SIZES = {  # as in transformers
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 250880}
DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
PARTS = Parts("input_layernorm", "self_attention", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def configure(fields: Fields) -> ModelConfig:
    """`own` says whether layers add to norms."""
    if fields.flag("slow_but_exact"):
        raise fields.error("slow_but_exact", "is true, which is not supported")
    fields = fields.renamed({"n_embed": "hidden_size"}) if fields.has("n_embed") else fields
    fields = with_inner(fields.renamed(NAMES).with_defaults(**SIZES)).with_defaults(max_position_embeddings=2048)
    config = read_plain(fields, DEFAULTS, "gelu_fast")
    return replace(config, has_biases=True, own=fields.flag("apply_residual_connection_post_layernorm"))


class NormedSumLayer(ClassicLayer):
    """Adds to norms, where the others add to what is normed."""

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        x = self.attention_norm(h)
        h.replace(x)
        h += self.attention(x, step)
        x = self.mlp_norm(h)
        h.replace(x)
        h += self.mlp(x)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    norms = LayerNormOptions(config.norm_eps)
    biases = alibi.biases(alibi.slopes(config.num_heads), config.max_position_embeddings)
    options = AttentionOptions(
        True, True, names=("", "", "", "dense"), qkv_name="query_key_value", qkv_groups=config.num_heads, biases=biases)
    kind = NormedSumLayer if config.own else ClassicLayer
    layer = functools.partial(kind, config, source, options=options, norms=norms, parts=PARTS)
    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings, norm=norms), norms)

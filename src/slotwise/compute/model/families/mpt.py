"""MPT (MosaicML, 2023): positions by ALiBi, norms and products without biases."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families.gpt2 import ClassicLayer, Parts, read_plain, with_inner
from slotwise.compute.model.families.llama import clipped
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers import alibi
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import LayerNormOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, read_network

NAMES = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"}
DEFAULTS = ConfigDefaults(norm_eps=1e-5, tie_word_embeddings=True)
PARTS = Parts("norm_1", "attn", "norm_2", "ffn.up_proj", "ffn.down_proj")
SIZES = {  # as in transformers
    "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "max_position_embeddings": 2048,
    "vocab_size": 50368}
PLAIN: dict[str, tuple[object, ...]] = {  # values that are computed, of fields with others in llm-foundry
    "no_bias": (True,), "logit_scale": (), "embedding_fraction": (1, 1.0), "expansion_ratio": (4,),
    "norm_type": ("low_precision_layernorm", "layernorm")}
PLAIN_ATTENTION: dict[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention",), "alibi": (True,), "alibi_bias_max": (8,), "prefix_lm": (False,),
    "qk_ln": (False,), "attn_uses_sequence_id": (False,)}


def configure(fields: Fields) -> ModelConfig:
    attention = fields.section("attn_config")
    for section, plain in ((fields, PLAIN), (attention, PLAIN_ATTENTION)):
        for name, values in plain.items():
            if section.has(name) and section.values[name] not in values:
                raise section.error(name, f"is {section.values[name]!r:.40}, which is not supported")
    fields = with_inner(fields.renamed(NAMES).with_defaults(**SIZES))
    config = read_plain(fields, DEFAULTS, "gelu")
    return replace(
        config, qkv_bias=False, output_bias=False, mlp_bias=False, has_biases=True,
        attention_scale=attention.number("softmax_scale") if attention.has("softmax_scale") else 0.0,
        qkv_clip=attention.number("clip_qkv") if attention.has("clip_qkv") else 0.0)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    norms = LayerNormOptions(config.norm_eps, has_bias=False)
    options = AttentionOptions(
        names=("", "", "", "out_proj"), qkv_name="Wqkv", qkv=clipped(config.qkv_clip),
        biases=alibi.biases(alibi.mpt_slopes(config.num_heads), config.max_position_embeddings))
    layer = functools.partial(ClassicLayer, config, source, options=options, norms=norms, parts=PARTS)
    return read_network(config, source, layer, EndOptions(config.tie_word_embeddings), norms)

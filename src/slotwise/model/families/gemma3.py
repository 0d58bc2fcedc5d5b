"""Gemma 3 (Gemma Team, 2025), text: Gemma 2 with norms of queries and keys in place of capped scores, and a rotary
embedding of their own for layers with a window, which are five of six.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slotwise.model.families.gemma2 import ACTIVATIONS, DEFAULTS
from slotwise.model.fields import Fields
from slotwise.model.model_config import (
    FULL,
    SLIDING,
    ModelConfig,
    read_common,
    read_layer_types,
    read_ropes,
    read_window,
)

THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
TEXT_DEFAULTS = {  # of a config for images and text, which leaves out what is as in the smallest such model
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131_072}
SHARED = ("architectures", "dtype", "torch_dtype", "quantization", "quantization_config", "tie_word_embeddings",
          "eos_token_id")  # fields of such a config that its text part need not have


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    pattern = fields.integer("sliding_window_pattern", default=6)
    kinds = fields.texts("layer_types") if fields.has("layer_types") else tuple(
        SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    windows = read_layer_types(fields, read_window(fields), kinds)
    ropes = read_ropes(fields, {FULL: fields.number("rope_theta", default=THETA),
                                SLIDING: fields.number("rope_local_base_freq", default=LOCAL_THETA)})
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is true, which is not supported")
    fields.refuse(("attn_logit_softcapping",), "is set, which this family does not compute")
    bias = fields.flag("attention_bias")
    return replace(
        read_common(fields, DEFAULTS, ACTIVATIONS, [ropes[kind] for kind in kinds]),
        attention_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        logit_soft_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def configure_text(fields: Fields) -> ModelConfig:
    """The text part of a model for images and text: prompts are text."""
    return configure(text_part(fields, TEXT_DEFAULTS))


def text_part(fields: Fields, defaults: Mapping[str, object]) -> Fields:
    """The fields of the text part of a model for images and text, `defaults` in place of those that it leaves out."""
    shared = {name: fields.values[name] for name in SHARED if fields.values.get(name) not in (None, {})}
    text = {name: value for name, value in fields.section("text_config").values.items() if value is not None}
    return Fields({**defaults, "dtype": None, **text, **shared}, f"{fields.where}, text_config")

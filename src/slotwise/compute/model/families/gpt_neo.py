"""GPT-Neo (Black et al., 2021): GPT-2's shape with a window in every second layer, and scores that are not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slotwise.compute.model.families.gpt2 import (
    DEFAULTS,
    ClassicLayer,
    Parts,
    compose_layers,
    read_plain,
    table_ends,
    with_inner,
)
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import AttentionOptions
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import MAX_LAYERS, ModelConfig
from slotwise.compute.model.network import Network

NAMES = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
PARTS = Parts("ln_1", "attn.attention", "ln_2", "mlp.c_fc", "mlp.c_proj")
GLOBAL, LOCAL = "global", "local"
TYPES = [[[GLOBAL, LOCAL], 12]]


def configure(fields: Fields) -> ModelConfig:
    fields = with_inner(fields.renamed(NAMES))
    config, window = read_plain(fields, DEFAULTS, "gelu_new", "activation_function"), fields.integer(
        "window_size", default=256)
    kinds = fields.texts("attention_layers") if fields.has("attention_layers") else _expanded(fields)
    if unknown := set(kinds) - {GLOBAL, LOCAL}:
        raise fields.error("attention_layers", f"holds {min(unknown)!r:.40}, which is not supported")
    if len(kinds) != config.num_layers:
        raise fields.error("attention_types", f"names {len(kinds)} layers, num_layers {config.num_layers}")
    windows = tuple([window if kind == LOCAL else 0 for kind in kinds])
    return replace(config, qkv_bias=False, attention_scale=1.0, windows=windows)


def _expanded(fields: Fields) -> tuple[str, ...]:
    """The kinds of all layers: `attention_types` has lists of kinds, and how often each list repeats."""
    kinds: list[str] = []
    types: Any = fields.values.get("attention_types") or TYPES
    try:
        for each, times in types:
            if not 0 < len(each) * times <= MAX_LAYERS or not all(isinstance(kind, str) for kind in each):
                raise ValueError
            kinds += [*each] * times
    except (TypeError, ValueError) as error:
        raise fields.error("attention_types", "must be a list of pairs: a list of kinds, and a number") from error
    return tuple(kinds)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    options = AttentionOptions(output_bias=True, names=("q_proj", "k_proj", "v_proj", "out_proj"))
    return compose_layers(config, source, ClassicLayer, PARTS, options, table_ends(config))

"""EXAONE with experts (LG AI Research, 2026): norms of each head's query and key, windows in three of four layers, of
which alone rotate, and DeepSeek-V3's experts behind the first layer.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.kernels.interface import Routing
from slotwise.compute.model.families import exaone4, glm4_moe
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig, read_grouped_mixture
from slotwise.compute.model.network import ExpertNames, Network

NAMES = ExpertNames(correction="mlp.e_score_correction_bias")


def configure(fields: Fields) -> ModelConfig:
    """Windows are those of EXAONE 4, with another default."""
    if not fields.has("sliding_window") and not fields.is_null("sliding_window"):
        fields = Fields({**fields.values, "sliding_window": 4096}, fields.where)
    config = exaone4.configure(fields)
    mixture = read_grouped_mixture(
        fields, config.num_layers, Routing(64, 8, is_normalized=True, scale=2.5), intermediate_size=1024,
        count="num_experts", shared="num_shared_experts")
    return replace(config, mixture=mixture)


def compose(config: ModelConfig, source: WeightSource) -> Network:
    return glm4_moe.compose(config, source, NAMES)

"""A.X K1 (SK Telecom, 2026): DeepSeek-V3 with a norm behind the experts of a layer."""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families.deepseek import V3_NAMES, LatentLayer, read_latent, read_v3_mixture
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig
from slotwise.compute.model.network import Network, read_network


def configure(fields: Fields) -> ModelConfig:
    config = read_latent(fields, ConfigDefaults(num_kv_heads=64))
    return replace(config, mixture=read_v3_mixture(fields, config.num_layers, num_dense=1, num_experts=192))


class AXK1Layer(LatentLayer):
    """A layer with experts; those without are DeepSeek-V3's."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        super().__init__(config, source, index, V3_NAMES)
        self.mlp_post_norm = RMSNorm(source, f"model.layers.{index}.post_mlp_layernorm", config.hidden_size,
                                     NormOptions(config.norm_eps))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention(self.attention_norm(h), step)
        h += self.mlp_post_norm(self.mlp(self.mlp_norm(h)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    dense = functools.partial(LatentLayer, config, source, names=V3_NAMES)
    sparse = functools.partial(AXK1Layer, config, source)
    return read_network(
        config, source, lambda index: sparse(index) if config.has_experts(index) else dense(index),
        EndOptions(config.tie_word_embeddings), NormOptions(config.norm_eps))

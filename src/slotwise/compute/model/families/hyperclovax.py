"""HyperCLOVA X Think (NAVER, 2025): Granite with norms behind attention and MLP, too.

    h = h + m * norm(attention(norm(h))),  h = h + m * norm(down(silu(gate(norm(h))) * up(norm(h))))

`granite.py` says where m is.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from slotwise.compute.model.families import granite, llama
from slotwise.compute.model.families.llama import LlamaLayer
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.attention import LayerStep
from slotwise.compute.model.layers.embedding_and_head import EndOptions
from slotwise.compute.model.layers.norm import NormOptions, ResidualStream, RMSNorm
from slotwise.compute.model.layers.rank_weights import WeightSource
from slotwise.compute.model.model_config import ModelConfig
from slotwise.compute.model.network import Network, read_network


def configure(fields: Fields) -> ModelConfig:
    """Logits are multiplied by what Granite divides them by; `own` is the epsilon of norms behind, 0 without them."""
    config, residual = granite.configure(fields), fields.number("residual_multiplier", default=1.0)
    has_norms = fields.flag("use_post_norm", default=True)
    return replace(
        config, attention_scale=fields.number("attention_multiplier", default=config.head_dim**-0.5),
        logit_scale=fields.number("logits_scaling", default=1.0),
        own=config.norm_eps * residual**2 if has_norms else 0.0)


class PostNormLayer(LlamaLayer):
    """Llama's layer with two more norms."""

    live_states = 4

    def __init__(self, config: ModelConfig, source: WeightSource, index: int) -> None:
        super().__init__(config, source, index)
        assert isinstance(config.own, float)
        norms = NormOptions(config.own)
        self.attention_post_norm, self.mlp_post_norm = (
            RMSNorm(source, f"model.layers.{index}.{name}", config.hidden_size, norms)
            for name in ("post_norm1", "post_norm2"))

    def forward(self, h: ResidualStream, step: LayerStep) -> None:
        h += self.attention_post_norm(self.attention(self.attention_norm(h), step))
        h += self.mlp_post_norm(self.mlp(self.mlp_norm(h)))


def compose(config: ModelConfig, source: WeightSource) -> Network:
    if not config.own:
        return llama.compose(config, source)
    layer = functools.partial(PostNormLayer, config, source)
    ends = EndOptions(config.tie_word_embeddings, config.embedding_scale, logit_scale=config.logit_scale)
    return read_network(config, source, layer, ends, NormOptions(config.norm_eps))

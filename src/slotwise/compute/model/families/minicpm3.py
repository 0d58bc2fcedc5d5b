"""MiniCPM3 (Hu et al., "MiniCPM", 2024): compressed attention, and factors for embedding, residual stream and logits.

As in `granite.py`, the residual stream is kept divided by the factor of what is added to it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from slotwise.compute.model.families.deepseek import LatentDefaults, read_latent
from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import ConfigDefaults, ModelConfig

COMMON = ConfigDefaults(num_kv_heads=40, norm_eps=1e-5, tie_word_embeddings=True)


def configure(fields: Fields) -> ModelConfig:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    sizes = LatentDefaults(query_rank=768, rank=256, nope_dim=64, rope_dim=32, value_dim=max(1, hidden // heads))
    config = read_latent(fields, COMMON, sizes, has_neighbors=False)
    residual = 1.0
    if not fields.is_null("scale_depth"):
        residual = fields.number("scale_depth", default=1.4) / math.sqrt(config.num_layers)
    base = hidden if fields.is_null("dim_model_base") else fields.integer("dim_model_base", default=256)
    return replace(
        config,
        embedding_scale=fields.number("scale_emb", default=12.0) / residual,
        norm_eps=config.norm_eps / residual**2,
        logit_scale=base / hidden,
        mlp_bias=fields.flag("mlp_bias"))

"""Granite 3 (Granite Team, 2024): Llama with factors for embedding, scores, logits and the residual stream.

    x = x + m * attention(norm(x)),  x = x + m * down(silu(gate(norm(x))) * up(norm(x)))

The residual stream is kept divided by m, which needs no multiplication in a step: the embedding is divided by m, sums
have the factor 1, and since a norm divides by the size of its input, only its epsilon changes, to epsilon / m**2.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import ModelConfig
from slotwise.model.families import llama
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    config, residual = llama.configure(fields), fields.number("residual_multiplier", default=1.0)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / residual,
        rms_norm_eps=config.rms_norm_eps / residual**2,
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )

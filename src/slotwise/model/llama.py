"""Llama 2 and 3.x (Touvron et al., 2023; Grattafiori et al., 2024), and what shares their shape, such as SmolLM2.

    x = x + attention(norm(x)),  x = x + down(silu(gate(norm(x))) * up(norm(x)))

Later versions differ only in numbers: fewer key than query heads, a larger rotary base, `llama3` scaling, a head tied
to the embedding.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.model.config import ModelConfig, read_common
from slotwise.model.fields import Fields


def configure(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(read_common(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))

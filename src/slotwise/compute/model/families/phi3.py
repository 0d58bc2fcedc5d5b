"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama whose queries, keys and values are one weight, as are gates and
what they gate; longer contexts by LongRoPE; Phi-4-mini rotates three quarters of a head.
"""

from __future__ import annotations

from dataclasses import replace

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.model_config import (
    MAX_LAYERS,
    ConfigDefaults,
    ModelConfig,
    read_common,
    read_head_dim,
    read_rope,
    read_window,
)

OLDER = {"su": "longrope", "yarn": "longrope"}  # what the first checkpoints call it


def configure(fields: Fields) -> ModelConfig:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    fields = Fields({"original_max_position_embeddings": 4096, **fields.values}, fields.where)
    rope = read_rope(fields, head_dim=read_head_dim(fields), aliases=OLDER)
    config = read_common(fields, ConfigDefaults(norm_eps=1e-5), ropes=(rope,) * num_layers)
    return replace(config, windows=(read_window(fields, 0),) * num_layers, has_fused_qkv=True, has_fused_gates=True)

"""Rotary tables against the frequencies transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotwise.model.fields import Fields
from slotwise.model.rope import Rope, read_rope, rotary_table

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
    YARN,
    YARN | {"truncate": False},
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_table_is_that_of_transformers(scaling: object, head_dim: int) -> None:
    # Imported here, not by every process that looks for tests.
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=2048, rope_parameters=dict(scaling))
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    half = head_dim // 2
    expected = torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1)

    fields = {"max_position_embeddings": 2048, "rope_parameters": scaling}
    table = rotary_table(read_rope(Fields(fields, "config.json")), head_dim, 2048)
    assert table.dtype == torch.float32 and table.is_contiguous()
    assert torch.allclose(table, expected, atol=2e-4)


def test_scalings_differ_from_each_other() -> None:
    tables = [
        rotary_table(read_rope(Fields({"max_position_embeddings": 2048, "rope_parameters": s}, "")), 64, 2048)
        for s in SCALINGS
    ]
    gaps = [(a - b).abs().max() for i, a in enumerate(tables) for b in tables[:i]]
    assert min(gaps) > 0.01


def test_first_position_does_not_turn() -> None:
    table = rotary_table(Rope(10_000.0), 8, 3)
    assert table[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert table[2, 0].item() == pytest.approx(torch.tensor(2.0).cos().item())

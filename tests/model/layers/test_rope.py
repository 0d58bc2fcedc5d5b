"""Rotary tables against the frequencies transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotwise.model.fields import Fields
from slotwise.model.layers.rope import CHUNK, Rope, RotaryTable, read_rope, rotary_table

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
    table = rotary_table(read_rope(Fields(fields, "config.json")), head_dim, 0, 2048)
    assert table.dtype == torch.float32 and table.is_contiguous()
    assert torch.allclose(table, expected, atol=2e-4)


def test_scalings_differ_from_each_other() -> None:
    tables = [
        rotary_table(read_rope(Fields({"max_position_embeddings": 2048, "rope_parameters": s}, "")), 64, 0, 2048)
        for s in SCALINGS
    ]
    gaps = [(a - b).abs().max() for i, a in enumerate(tables) for b in tables[:i]]
    assert min(gaps) > 0.01


def test_first_position_does_not_turn() -> None:
    table = rotary_table(Rope(10_000.0), 8, 0, 3)
    assert table[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert table[2, 0].item() == pytest.approx(torch.tensor(2.0).cos().item())


def test_a_table_is_computed_as_far_as_it_is_read() -> None:
    rope, longest = Rope(10_000.0), 2**40 // 2**14  # 2 GiB, of which next to nothing is touched
    table = RotaryTable(rope, 8, longest, torch.device("cpu"))
    place = table.until(3).data_ptr()
    for end in (1, CHUNK, CHUNK + 1, 3 * CHUNK):
        found = table.until(end)
        assert torch.equal(found[:end], rotary_table(rope, 8, 0, end))
        assert (found.data_ptr(), len(found)) == (place, longest), "recorded steps know where it is"
    short = RotaryTable(rope, 8, 5, torch.device("cpu"))
    assert torch.equal(short.until(5), rotary_table(rope, 8, 0, 5)) and len(short.until(6)) == 5

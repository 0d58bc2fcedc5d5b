"""Rotary tables against the frequencies transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotwise.compute.model.fields import Fields
from slotwise.compute.model.layers.rope import CHUNK, LongRope, NoRope, Rope, RotaryTable, rotary_table
from slotwise.compute.model.model_config import read_rope
from slotwise.errors import CheckpointError

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
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_table_is_that_of_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    expected = _theirs(scaling, head_dim)
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


def test_dynamic_scaling_begins_behind_the_longest_position_that_is_served() -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    fields = {"max_position_embeddings": 2048, "rope_parameters": scaling}
    assert read_rope(Fields(fields, "")) == Rope(10_000.0)
    assert torch.allclose(_theirs(scaling, 32), rotary_table(Rope(10_000.0), 32, 0, 2048), atol=2e-4)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("scaling", [SCALINGS[1], SCALINGS[2], SCALINGS[3], YARN], ids=lambda s: s["rope_type"])
def test_a_part_of_a_head_turns_as_in_transformers(scaling: dict[str, Any], share: float) -> None:
    fields = {"max_position_embeddings": 2048, "rope_parameters": scaling | {"partial_rotary_factor": share}}
    rope, head_dim = read_rope(Fields(fields, ""), head_dim=64), 64
    turning = int(head_dim * share)
    order, table = rope.order(head_dim), rotary_table(rope, head_dim, 0, 2048)
    assert order is not None and sorted(order.tolist()) == list(range(head_dim))
    low, high = order.view(2, -1)
    assert low[: turning // 2].tolist() == list(range(turning // 2))
    assert high[: turning // 2].tolist() == list(range(turning // 2, turning))
    cosines, sines = table.view(2048, 2, -1).unbind(1)
    assert (cosines[:, turning // 2 :] == 1).all() and (sines[:, turning // 2 :] == 0).all()
    turned = torch.cat((cosines[:, : turning // 2], sines[:, : turning // 2]), dim=-1)
    assert torch.allclose(turned, rotary_table(read_rope(Fields(fields | {
        "rope_parameters": scaling}, "")), turning, 0, 2048), atol=2e-4)


def test_neighbors_are_put_in_the_halves() -> None:
    assert Rope(1e4, has_neighbors=True).order(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert Rope(1e4, has_neighbors=True, share=0.5).order(8).tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    assert Rope(1e4).order(8) is None


def test_without_positions_nothing_turns() -> None:
    assert rotary_table(NoRope(), 8, 0, 3).tolist() == [[1] * 4 + [0] * 4] * 3


@pytest.mark.parametrize("original", [512, 2048])
def test_longrope_is_that_of_transformers(original: int) -> None:
    factors = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.5 + i / 4 for i in range(16)]}
    scaling = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": original} | factors
    fields = {"max_position_embeddings": 2048, "rope_parameters": scaling}
    rope = read_rope(Fields(fields, ""), head_dim=32)
    assert isinstance(rope, LongRope)
    for positions in (256, 2048):  # short factors for both where the original context holds them
        table = RotaryTable(rope, 32, positions, torch.device("cpu")).until(positions)
        assert torch.allclose(table, _theirs(scaling, 32, positions), atol=2e-4), positions


@pytest.mark.parametrize(("scaling", "problem"), [
    ({"short_factor": [1.0] * 16}, "long_factor is missing"),
    ({"short_factor": [1.0] * 15, "long_factor": [1.0] * 16}, "short_factor must have 16 numbers, one for each pair"),
    ({"short_factor": [1.0] * 16, "long_factor": [0.0] * 16}, "long_factor must be a number above 0"),
    ({"short_factor": 2.0, "long_factor": [1.0] * 16}, "short_factor must be a list of at most"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must rotate an even number of 32 dimensions, not 1.5"),
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor must rotate an even number of 32 dimensions, not 0.1"),
])
def test_refusals(scaling: dict[str, Any], problem: str) -> None:
    fields = {"max_position_embeddings": 2048, "rope_parameters": scaling | {"rope_type": "longrope"}}
    with pytest.raises(CheckpointError, match=problem):
        read_rope(Fields(fields, "config.json"), head_dim=32)


def _theirs(scaling: dict[str, Any], head_dim: int, positions: int = 2048) -> torch.Tensor:
    """The table of transformers, which is imported here and not by every process that looks for tests."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=2048, rope_parameters=dict(scaling))
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    half = head_dim // 2
    return torch.cat((cosines[0, :, :half], sines[0, :, :half]), dim=-1)

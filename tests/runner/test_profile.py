"""Steps that only show how much memory they take."""

from __future__ import annotations

import checkpoints
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotwise.kernels.checked import CheckedKernels
from slotwise.kernels.reference import ReferenceKernels
from slotwise.kernels.sampling import draw
from slotwise.model.load import load_model
from slotwise.runner.profile import batch_of_nothing, measured_workspace

BLOCK = 4


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 90))
def test_a_batch_of_nothing_is_a_batch(tokens, rows, longest):
    rows = min(rows, tokens)
    batch = batch_of_nothing(tokens, rows, longest, BLOCK, torch.device("cpu"))
    CheckedKernels(ReferenceKernels()).check_batch(batch)
    assert len(batch.token_ids) == tokens and len(batch.context_lens) == len(batch.sample_at) == rows
    assert set(batch.slot_mapping.tolist()) <= set(range(BLOCK)), "all of it lies in block 0"
    assert not batch.block_tables.any()
    assert batch.max_context_len >= longest
    assert batch.block_tables.shape[1] * BLOCK >= batch.max_context_len
    assert batch.context_lens.tolist() == batch.query_starts.diff().tolist()
    assert batch.sample_at.tolist() == (batch.query_starts[1:] - 1).tolist()


def test_the_largest_steps_are_run_and_added_up(tmp_path, monkeypatch):
    """Every step runs, twice, and its second run counts: the counters are a GPU's in name, the work is real."""
    decoder = load_model(checkpoints.make("qwen2", tmp_path), kernels=CheckedKernels(ReferenceKernels()))
    drawn, allocated = [], iter([100, 100, 300, 300])
    largest = iter([900, 700, 1000, 500])
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(largest))

    def watched(logits: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        drawn.append(logits.shape)
        return draw(logits, *given)

    total = measured_workspace(decoder, watched, BLOCK, [(50, 7, 90), (8, 8, 90)])
    assert total == (700 - 100) + (500 - 300)
    assert drawn == [(7, 1024), (7, 1024), (8, 1024), (8, 1024)]

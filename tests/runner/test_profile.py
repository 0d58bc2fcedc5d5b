"""Steps that only show how much memory they take."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from slotwise.kernels.checked import CheckedKernels
from slotwise.kernels.reference import ReferenceKernels
from slotwise.runner.profile import batch_of_nothing

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

"""Masks of grammars on logits, against plain torch."""

from __future__ import annotations

import pytest
import torch
from support.cuda_device import DEVICE, interpreted

from slotwise.compute.kernels.reference import allowed_only

with interpreted():
    from slotwise.compute.kernels.cuda.sampling import mask_rows


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 33, 299, 4100])
@pytest.mark.parametrize("rows", [[], [2], [0, 3, 4]])
def test_what_a_mask_does_not_allow_is_impossible(kind, vocab, rows):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(kind)
    words = torch.randint(-(1 << 31), 1 << 31, (len(rows), -(-vocab // 32)), generator=generator).int()
    expected = allowed_only(logits, torch.tensor(rows), words) if rows else logits
    actual = mask_rows(logits.to(DEVICE), torch.tensor(rows, dtype=torch.int64).to(DEVICE), words.to(DEVICE))
    assert torch.equal(actual.cpu(), expected)


def test_rows_that_are_a_part_of_others_columns():
    """Logits whose rows lie apart, and what lies between them."""
    whole = torch.zeros(3, 100, device=DEVICE)
    mask_rows(whole[:, :70], torch.tensor([1], device=DEVICE), torch.zeros(1, 3, dtype=torch.int32, device=DEVICE))
    assert whole[1, :70].isneginf().all()
    assert (whole[1, 70:] == 0).all() and (whole[::2] == 0).all()

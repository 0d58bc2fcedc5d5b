"""Blocks go to page-locked host memory and come back while the host goes on, in the order told."""

from __future__ import annotations

import pytest
import torch
from support.cuda_device import DEVICE, KERNELS

from slotwise.compute.kernels.interface import AttentionShape
from slotwise.compute.runner import kv_blocks
from slotwise.compute.runner.kv_blocks import HostBlocks
from slotwise.core.record import Copy

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, scale=1.0)
LAYERS, BLOCKS = 4, 16


@pytest.mark.parametrize("staged", [3, BLOCKS])
def test_a_round_trip_through_the_host_changes_nothing(staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [KERNELS.allocate_cache(BLOCKS, 16, SHAPE, torch.bfloat16) for _ in range(LAYERS)]
    pieces = [piece for cache in caches for piece in KERNELS.cache_pieces(cache)]
    block_bytes = LAYERS * KERNELS.cache_bytes_per_block(16, SHAPE, torch.bfloat16)
    for piece in pieces:
        piece.copy_(torch.randn(piece.shape))
    before = [piece.clone() for piece in pieces]
    monkeypatch.setattr(kv_blocks, "STAGING", staged * block_bytes)
    monkeypatch.setattr(kv_blocks, "SLAB", 5 * block_bytes)
    host = HostBlocks(BLOCKS, pieces)
    assert all(place.is_pinned() for place in host._places) == (DEVICE == "cuda")
    host.save([Copy(block, BLOCKS - 1 - block) for block in range(BLOCKS)])
    for piece in pieces:
        piece.zero_()
    host.load([Copy(place, place) for place in range(BLOCKS)])
    for piece, was in zip(pieces, before, strict=True):
        assert torch.equal(piece, was.flip(0))

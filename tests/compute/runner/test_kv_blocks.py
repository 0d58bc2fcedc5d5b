"""Blocks of caches as bytes."""

from __future__ import annotations

import pytest
import torch

from slotwise.compute.runner.kv_blocks import HostCacheBlocks


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_a_block_written_elsewhere_is_the_one_that_was_read(kind: torch.dtype) -> None:
    ours = [torch.randint(-100, 100, (5, 2, size)).to(kind) for size in (3, 8)]
    theirs = [torch.zeros_like(piece) for piece in ours]
    one, other = HostCacheBlocks(ours, "4 tokens"), HostCacheBlocks(theirs, "4 tokens")
    assert one.block_bytes == 2 * (3 + 8) * kind.itemsize and one.layout == other.layout
    buffer = memoryview(bytearray(one.block_bytes))
    one.read(3, buffer)
    other.write(1, buffer)
    for mine, yours in zip(ours, theirs, strict=True):
        assert torch.equal(mine[3], yours[1])
        assert not yours[[0, 2, 3, 4]].any()


def test_layouts_differ_where_blocks_do() -> None:
    of = [torch.zeros(5, 2, 3), torch.zeros(5, 2, 3, dtype=torch.bfloat16), torch.zeros(5, 3, 3)]
    layouts = [HostCacheBlocks([piece], "4 tokens of model a").layout for piece in of]
    layouts += [HostCacheBlocks(of[:1], what).layout for what in ("8 tokens of model a", "4 tokens of model b")]
    layouts.append(HostCacheBlocks([of[0], of[0]], "4 tokens of model a").layout)
    assert len(set(layouts)) == 6

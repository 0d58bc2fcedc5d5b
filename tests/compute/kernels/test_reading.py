"""Reads that are timed touch every byte of what they are said to read."""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
import torch

from slotwise.compute.kernels.cpu.launcher import HEADER, KernelLauncher
from slotwise.compute.kernels.cpu.reading import PIECE, READ, read_all
from slotwise.compute.kernels.cpu.threads import COUNTERS, LINE


@pytest.mark.parametrize("threads", [1, 2])
def test_every_byte_of_the_pieces_is_read_once(threads: int) -> None:
    lines = torch.randint(-1 << 62, 1 << 62, (3 * PIECE // 64, 8), generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(3, 8, dtype=torch.int64)
    launcher = KernelLauncher(threads)
    for piece, own in enumerate(sums):  # one piece at a time: the last one that a thread reads is what it leaves
        launcher.give(lines.data_ptr() + piece * PIECE, 1, 1, own.data_ptr())
        launcher.alone(READ)
    assert sums.tolist() == [[reduce(xor, column) for column in zip(*piece.tolist(), strict=True)]
                             for piece in lines.chunk(3)]


def test_reading_takes_all_pieces() -> None:
    launcher, data = KernelLauncher(2), torch.zeros(5 * PIECE, dtype=torch.uint8)
    read_all(data, launcher)
    taken = launcher._block[:HEADER]  # counters of the queues
    first, second = COUNTERS // 8, (COUNTERS + LINE) // 8
    assert taken[first] >= 2 and taken[second] >= 3  # five pieces, in queues of two and three

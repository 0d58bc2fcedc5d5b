"""Columns on their way to a device and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotwise.compute.runner.staging import rows_of, send, sender, to_host

CPU = torch.device("cpu")
SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4)


def columns(shapes: list[tuple[int, ...]], kind: type, draw: np.random.Generator) -> list[np.ndarray]:
    return [draw.integers(-2**31, 2**31, shape).astype(kind) for shape in shapes]


@given(SHAPES, SHAPES)
def test_columns_arrive_as_they_were(longs, ints):
    draw = np.random.default_rng(0)
    sent = (columns(longs, np.int64, draw), columns(ints, np.int32, draw))
    assert all(tensor.data_ptr() % 16 == 0 for tensor in send(CPU, *sent))
    for arrived in (send(CPU, *sent), sender(CPU)(*sent)):
        assert len(arrived) == len(longs) + len(ints)
        for tensor, column in zip(arrived, (*sent[0], *sent[1]), strict=True):
            assert tensor.numpy().dtype == column.dtype and tensor.shape == column.shape
            assert np.array_equal(tensor.numpy(), column)


def test_what_was_sent_is_not_what_the_host_goes_on_with():
    """A packed step has memory of its own: the host may change its columns while the copy is still to come."""
    column = np.arange(5)
    (tensor,) = send(CPU, [column], [])
    column[:] = -1
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_a_strided_column_is_sent_whole():
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    (tensor,) = send(CPU, [], [table[:, ::2]])
    assert tensor.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_the_host_reads_the_tensors_of_the_host():
    tensor = torch.arange(3)
    assert to_host(tensor).tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4)])
def test_rows_of_a_tensor(kind, shape):
    tensor = torch.randint(-9, 9, shape).to(kind)
    for places in ([3, 0, 3], [4], [0, 1, 2, 3], [1, 0, 2, 3, 4]):
        assert torch.equal(rows_of(tensor, places), tensor[places])
    assert rows_of(tensor, range(5)) is tensor

"""Sizes that steps are captured at, and, where there is a GPU, captures that share their memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_device import DEVICE, KERNELS

from slotwise.compute.kernels.cuda import graphs

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="no GPU: nothing is captured")


@given(st.integers(1, graphs.MAX_ROWS), st.integers(1, 200_000))
def test_a_size_has_room_and_is_not_much_larger(rows, context):
    captured, longest = graphs.capture_size(rows, context)
    assert rows <= captured <= min(2 * rows, rows + graphs.FEW_ROWS - 1) or rows == captured == 1
    assert context <= longest <= max(graphs.SHORTEST, 4 * context)
    assert graphs.capture_size(captured, longest) == (captured, longest), "a size is its own"


def test_the_sizes_are_those_that_are_documented():
    sizes = sorted({graphs.capture_size(rows, 1)[0] for rows in range(1, 41)})
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graphs.capture_size(graphs.MAX_ROWS + 1, 1)[0] == 0
    assert [KERNELS.graph_size(rows, 5) for rows in (3, 9)] == [(4, graphs.SHORTEST), (16, graphs.SHORTEST)]


def test_what_cannot_be_captured_is_left_to_be_started_kernel_by_kernel(monkeypatch):
    """A driver that refuses: the work is done, nobody is told of a recording, and it is not tried again."""
    subject, done = graphs.CudaGraphs(torch.device("cuda")), []

    def refuses(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(subject, "_capture", refuses)
    assert subject.record(lambda: done.append(1)) is None
    assert subject.record(lambda: done.append(1)) is None
    assert done == [1]


def test_a_result_by_its_address_is_not_kept_alive():
    described = graphs._Memory(SimpleNamespace(numel=lambda: 6, itemsize=2, data_ptr=lambda: 4096))
    assert described.__cuda_array_interface__ == {
        "shape": (12,), "typestr": "|u1", "data": (4096, False), "version": 3}


@on_gpu
def test_captures_share_a_pool_and_run_in_any_order():
    subject = graphs.CudaGraphs(torch.device("cuda"))
    inputs = torch.randn(512, 256, device="cuda")
    weight = torch.randn(256, 256, device="cuda")
    recordings = {rows: subject.record(lambda rows=rows: (inputs[:rows] @ weight).relu() + 1) for rows in (512, 8, 64)}
    for rows in (8, 512, 64, 8, 64, 512):
        inputs.normal_()
        torch.testing.assert_close(recordings[rows].run(), (inputs[:rows] @ weight).relu() + 1)


@on_gpu
def test_what_a_capture_allocated_is_given_to_the_next():
    subject = graphs.CudaGraphs(torch.device("cuda"))
    inputs = torch.randn(1 << 20, device="cuda")
    first = subject.record(lambda: inputs * 2)
    before = torch.cuda.memory_reserved()
    results = [subject.record(lambda factor=factor: inputs * factor).run().sum().item() for factor in range(3, 20)]
    assert torch.cuda.memory_reserved() - before < 8 << 20
    assert results == pytest.approx([inputs.sum().item() * factor for factor in range(3, 20)], rel=1e-3)
    assert torch.equal(first.run(), inputs * 2)


@on_gpu
def test_the_first_result_is_there_at_once():
    subject = graphs.CudaGraphs(torch.device("cuda"))
    inputs = torch.randn(64, device="cuda")
    recording = subject.record(lambda: inputs * 3)
    assert torch.equal(recording.result, inputs * 3)

"""Kernels run again as one program yield what they yielded when each was started by itself."""

from __future__ import annotations

import pytest
import torch
from support import product_paths
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.launcher import Arena
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.reference import ReferenceKernels

HIDDEN, INNER, VOCABULARY = 96, 160, 300


class Block:
    """A few kernels that feed each other, as a layer's do."""

    def __init__(self, kernels: CpuKernels, kind: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        random = lambda *size: (torch.randn(*size, generator=generator) / 8).to(kind)
        self.kernels = kernels
        self.table, self.norm = random(VOCABULARY, HIDDEN), random(HIDDEN)
        self.gate_up, self.down = kernels.linear(random(2 * INNER, HIDDEN)), kernels.linear(random(HIDDEN, INNER))

    def __call__(self, token_ids: Tensor) -> Tensor:
        kernels = self.kernels
        residual = kernels.embed(self.table, token_ids)
        x = kernels.rms_norm(residual, self.norm, 1e-5)
        for _ in range(5):
            x = self.down(kernels.silu_mul(self.gate_up(x)))
            x = kernels.add_rms_norm(x, residual, self.norm, 1e-5)
        return x


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("kind", "quantization", "path"), [
    product_paths.param("float32", torch.float32, "none"),
    *(product_paths.param(path, torch.bfloat16, "none") for path in paths.DENSE if path != "onednn"),
    *(product_paths.param(path, torch.bfloat16, "int8") for path in paths.QUANTIZED)])
def test_a_recording_does_again_what_was_done(kind, quantization, path, threads):
    kernels = CpuKernels(threads, quantization, path=path)
    assert kernels.product_path(kind) == path
    block = Block(kernels, kind)
    for tokens in (1, 3, 40, 200):  # the last is enough work for threads to share
        token_ids = torch.zeros(tokens, dtype=torch.int64)
        recording = kernels.record(lambda ids=token_ids: block(ids))
        assert torch.equal(recording.result, block(token_ids))
        for seed in range(5):
            torch.manual_seed(seed)
            token_ids[:] = torch.randint(0, VOCABULARY, (tokens,))
            assert torch.equal(recording.run(), block(token_ids)), (tokens, seed)


def test_a_recording_calls_functions_of_torch_again():
    kernels = CpuKernels(2)
    block, scale = Block(kernels, torch.float32), torch.linspace(0.5, 2.0, HIDDEN)

    def work(ids: Tensor) -> Tensor:
        first = kernels.rowwise(lambda x: x * scale, block(ids))  # between kernels, and before the first of a layer
        second = kernels.rowwise(lambda x, y: x.tanh() + y, kernels.rms_norm(first, block.norm, 1e-5), first)
        return kernels.rms_norm(second, block.norm, 1e-5)

    ids = torch.zeros(7, dtype=torch.int64)
    recording = kernels.record(lambda: work(ids))
    for seed in range(3):
        torch.manual_seed(seed)
        ids[:] = torch.randint(0, VOCABULARY, (7,))
        assert torch.equal(recording.run(), work(ids))


@product_paths.each(["onednn"])
def test_what_torch_computes_is_not_recorded_and_not_done(path):
    kernels = CpuKernels(2, path=path)
    block = Block(kernels, torch.bfloat16)
    assert kernels.product_path(torch.bfloat16) == "onednn"
    assert kernels.record(lambda: pytest.fail("the work was done")) is None
    ids = torch.arange(5)
    assert torch.equal(block(ids), block(ids))  # kernel by kernel, as ever


def test_recordings_share_their_memory_and_do_not_disturb_each_other():
    kernels = CpuKernels(2)
    block = Block(kernels, torch.float32)
    inputs = [torch.randint(0, VOCABULARY, (tokens,)) for tokens in (50, 20, 7)]
    recordings = [kernels.record(lambda ids=ids: block(ids)) for ids in inputs]
    for _ in range(3):
        for ids, recording in zip(inputs, recordings, strict=True):
            assert torch.equal(recording.run(), block(ids))
    places = {recording.result.untyped_storage().data_ptr() for recording in recordings}
    assert len(places) == 1


def test_a_failing_recording_leaves_the_kernels_usable():
    kernels = CpuKernels(2)
    block, ids = Block(kernels, torch.float32), torch.arange(9)
    expected = block(ids)

    def fails() -> Tensor:
        block(ids)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        kernels.record(fails)
    assert torch.equal(block(ids), expected)
    assert torch.equal(kernels.record(lambda: block(ids)).run(), expected)


def test_the_arena_gives_out_again_only_what_was_dropped():
    arena = Arena()
    first = arena.empty((10, 10), torch.float32)
    second = arena.empty((10, 10), torch.float32)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    del first
    assert arena.empty((20, 5), torch.float32).data_ptr() == place


def test_embedding_is_the_table_s_rows():
    for kind in (torch.float32, torch.bfloat16):
        table, ids = torch.randn(50, 34).to(kind), torch.randint(0, 50, (700,))
        assert torch.equal(CpuKernels(2).embed(table, ids), ReferenceKernels().embed(table, ids))


def test_embedding_reads_nothing_outside_the_table():
    around = torch.full((54, 34), 7.0)
    table = around[2:52]
    table[:] = torch.randn(50, 34)
    ids = torch.tensor([-1, 50, 51, -2, 3])
    assert torch.equal(CpuKernels(2).embed(table, ids), table[[0, 49, 49, 0, 3]])

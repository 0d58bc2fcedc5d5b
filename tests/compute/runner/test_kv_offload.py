"""Blocks that go to host memory and come back hold what they held, whatever the layout of the cache.

That of a GPU is in tests/compute/kernels/cuda/test_offload.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import checkpoints

from slotwise.compose.engine_builder import load
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import AttentionShape, Kernels
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.runner import kv_blocks
from slotwise.compute.runner.kv_blocks import HostBlocks, staging_bytes
from slotwise.compute.runner.model_runner import DeviceLostError
from slotwise.core.params import SamplingSpec
from slotwise.core.record import Copy, StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.config import EngineConfig
from slotwise.engine.engine import Engine
from slotwise.engine.messages import Add

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=24, scale=1.0)
LAYERS, BLOCKS, PLACES = 3, 12, 7


@pytest.mark.parametrize("staged", [1, 2, 100], ids="{}_staged".format)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [ReferenceKernels, CpuKernels])
def test_what_comes_back_is_what_went(
    make: Callable[[], Kernels], kind: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = make()
    caches = [kernels.allocate_cache(BLOCKS, 4, SHAPE, kind) for _ in range(LAYERS)]
    pieces = [piece for cache in caches for piece in kernels.cache_pieces(cache)]
    block_bytes = LAYERS * kernels.cache_bytes_per_block(4, SHAPE, kind)
    assert sum(piece[0].nbytes for piece in pieces) == block_bytes
    for piece in pieces:
        piece.copy_(torch.randn(piece.shape))
    before = [piece.clone() for piece in pieces]
    monkeypatch.setattr(kv_blocks, "STAGING", staged * block_bytes)
    monkeypatch.setattr(kv_blocks, "SLAB", 3 * block_bytes)
    host = HostBlocks(PLACES, pieces)

    host.save([Copy(3, 0), Copy(11, 6), Copy(0, 2), Copy(7, 1)])
    for piece in pieces:
        piece[[0, 3, 7, 8, 9]] = 0
    host.load([Copy(6, 3), Copy(0, 8), Copy(1, 7)])
    host.save([Copy(8, 6)])  # over what is there
    host.load([Copy(6, 0)])
    now = {3: 11, 8: 3, 7: 7, 0: 3}  # block by whose contents it must have
    for piece, was in zip(pieces, before, strict=True):
        for block in range(BLOCKS):
            expected = torch.zeros_like(was[0]) if block == 9 else was[now.get(block, block)]
            assert torch.equal(piece[block], expected), block


def test_no_places_take_no_memory() -> None:
    assert staging_bytes(0, 1000) == 0 and staging_bytes(3, 1000) == 3000
    assert staging_bytes(10**9, 1 << 20) == kv_blocks.STAGING and staging_bytes(5, 1 << 30) == 1 << 30


# -- in an engine ------------------------------------------------------------------------------------------------

MANY, FEW = 400, 30  # blocks: all fit, or hardly those who run


class DistantKernels(CpuKernels):
    """The CPU's, as if its cache were not in host memory."""

    name = "distant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama3", tmp_path_factory.mktemp("llama3"))


def engine(folder: Path, kernels: Kernels, blocks: int, host_blocks: int, overlap: int) -> Engine:
    layer_bytes = kernels.cache_bytes_per_block(4, AttentionShape(4, 2, 32, 1.0), torch.float32)
    config = EngineConfig.of(
        model=str(folder), device="reference", dtype="float32", block_size=4, max_model_len=100, max_num_seqs=3,
        max_num_batched_tokens=32, kv_cache_memory=blocks * 3 * layer_bytes, overlap=overlap,
        kv_offloading_size=host_blocks * 3 * layer_bytes / 2**30)
    built, info = load(config, wrap=lambda _: kernels).engine(config)
    assert (info.limits.num_blocks, info.limits.num_host_blocks) == (blocks, host_blocks)
    return built


def commands() -> list[Add]:
    """Five beginnings of 40 tokens, taken up again and again."""
    draw = random.Random(5)
    beginnings = checkpoints.prompts([40] * 5, seed=1)
    ends = checkpoints.prompts([draw.randint(1, 12) for _ in range(24)], seed=2)
    return [
        Add(f"r{index}", RequestSpec(
            draw.choice(beginnings) + end, SamplingSpec(temperature=0.0, max_tokens=draw.randint(1, 24)), index))
        for index, end in enumerate(ends)]


def play(subject: Engine) -> tuple[dict[str, list[int]], list[StepRecord]]:
    """What every request was given, and all records."""
    outputs: dict[str, list[int]] = {}
    records = []
    for command in commands():
        subject.handle(command)
    while subject.has_work:
        records.append(subject.step())
        assert not any(end.message for end in records[-1].ended), records[-1].ended
        for name, tokens in zip(records[-1].plan.request_ids, records[-1].tokens, strict=True):
            outputs.setdefault(name, []).extend(tokens)
    return outputs, records


def computed(records: list[StepRecord]) -> int:
    return sum(sum(record.plan.counts) for record in records)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Where nothing is evicted."""
    return play(engine(folder, ReferenceKernels(), MANY, 0, overlap=0))[0]


@pytest.mark.parametrize(("kernels", "overlap"), [(ReferenceKernels, 1), (DistantKernels, 0), (DistantKernels, 1)])
def test_blocks_that_come_back_give_the_tokens_that_computing_them_would(
    folder: Path, expected: dict[str, list[int]], kernels: Callable[[], Kernels], overlap: int,
) -> None:
    without, computes = play(engine(folder, kernels(), FEW, 0, overlap))
    outputs, records = play(engine(folder, kernels(), FEW, 60, overlap))
    assert outputs == without == expected
    assert any(record.plan.saves for record in records) and any(record.plan.loads for record in records)
    assert computed(records) < 0.85 * computed(computes), "shared beginnings were evicted, and not computed again"


def test_a_step_that_fails_loses_no_copy(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks that failed plans, and those behind them, saved and loaded are used by later requests."""
    kernels, draw = ReferenceKernels(), random.Random(3)
    attention = kernels.attention

    def fails_at_times(*given: object) -> object:
        if draw.random() < 0.04:
            raise ArithmeticError("broken")
        return attention(*given)

    subject = engine(folder, kernels, FEW, 60, overlap=1)
    monkeypatch.setattr(kernels, "attention", fails_at_times)
    outputs: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    discarded = 0
    for command in commands():
        subject.handle(command)
    while subject.has_work:
        record = subject.step()
        ends |= {end.request_id: end.reason for end in record.ended}
        discarded += sum(len(plan.saves) + len(plan.loads) for plan in record.plans) if record.outcome.failure else 0
        for name, tokens in zip(record.plan.request_ids, record.tokens, strict=True):
            outputs.setdefault(name, []).extend(tokens)
    assert discarded > 5 and 3 < sum(reason == "error" for reason in ends.values()) < len(ends) - 3
    for name, tokens in expected.items():
        assert outputs.get(name, []) == (tokens if ends[name] != "error" else tokens[: len(outputs.get(name, []))])


def test_an_engine_whose_copies_fail_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later requests would read blocks that are counted as copied, and are not."""
    subject = engine(folder, ReferenceKernels(), FEW, 60, overlap=0)
    for command in commands():
        subject.handle(command)
    while not subject.step().plan.saves:
        pass
    monkeypatch.setattr(HostBlocks, "load", lambda self, copies: 1 / (not copies))
    record = subject.step()
    while not record.outcome.failure:
        record = subject.step()
    assert "blocks could not be copied: ZeroDivisionError" in record.outcome.failure
    with pytest.raises(DeviceLostError, match="no step can follow: blocks could not be copied"):
        subject.step()


def test_a_wrong_copy_would_have_shown(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that do not come back, so that others' contents are read, change what is said."""
    monkeypatch.setattr(HostBlocks, "load", lambda self, copies: None)
    outputs, _ = play(engine(folder, ReferenceKernels(), FEW, 60, overlap=0))
    assert outputs != expected

"""Decode steps run from a recording, against the same steps kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import product_paths
from support.checkpoints import FAMILIES, make

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import linear_bf16, linear_blocks, paths
from slotwise.compute.kernels.interface import RaggedBatch
from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.loading import load_model
from slotwise.compute.runner.decode_graphs import DecodeGraphs
from slotwise.compute.runner.input_batch import SlotTable
from slotwise.core.params import SamplingSpec
from slotwise.core.record import NewBlocks, NewRequest, RowKind, StepPlan
from slotwise.core.request import RequestSpec

BLOCK, BLOCKS, WIDTH = 16, 700, 40


def decode_batch(contexts: list[int], vocabulary: int, drafts: list[int] | None = None) -> RaggedBatch:
    """A row for each context, its blocks anywhere; the last tokens of it are so many drafts."""
    rows, width = len(contexts), -(-max(contexts) // BLOCK)
    tables = torch.randperm(BLOCKS).int()[: rows * width].view(rows, width)
    counts = torch.tensor(drafts or [0] * rows) + 1
    row_of, tokens = torch.arange(rows).repeat_interleave(counts), int(counts.sum())
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    positions = (torch.tensor(contexts) - counts - starts[:-1])[row_of] + torch.arange(tokens)
    places = tables[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK
    return RaggedBatch(
        torch.randint(3, vocabulary, (tokens,)), positions, places, starts.int(),
        torch.tensor(contexts, dtype=torch.int32), tables, torch.arange(tokens), int(counts.max()), max(contexts))


class Pair:
    """The same decoder and caches, recorded and not."""

    def __init__(
        self, folder: Path, kind: str, num_slots: int = 16, cached: str = "auto", path: str = "float32",
        quantization: str = "none",
    ) -> None:
        kernels = CpuKernels(quantization=quantization, kv_cache_dtype=cached, path=path)
        self.decoder: Decoder = load_model(folder, kernels=kernels, dtype=kind)
        make_cache = self.decoder.kernels.allocate_cache
        self.caches = [make_cache(BLOCKS, BLOCK, shape, self.decoder.config.dtype)
                       for shape in self.decoder.layer_shapes]
        for cache in self.caches:
            if cached == "int8":
                cache.storage.random_(0, 64)  # four such bytes are a scale below 1
            else:
                cache.storage.normal_()
        self.slots = SlotTable(num_slots, WIDTH * BLOCK, BLOCK, BLOCKS - 1)
        self.steps = DecodeGraphs(self.decoder, self.caches, self.slots)

    def check(self, contexts: list[int], drafts: list[int] | None = None) -> None:
        batch = decode_batch(contexts, self.decoder.config.vocab_size, drafts)
        expected = self.computed(batch)
        actual = self.steps.logits(batch)
        assert actual is not None
        assert torch.equal(actual, expected), contexts

    def computed(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits of a batch, kernel by kernel."""
        on_trial = replace(batch, on_trial=torch.ones(len(batch.context_lens), dtype=torch.int32))
        return self.decoder.logits(self.decoder.hidden(on_trial, self.caches))


@pytest.mark.parametrize(("family", "kind", "cached", "path"), [
    *(product_paths.param("float32", family, "float32", "auto") for family in FAMILIES),
    product_paths.param("float32", "mistral", "float32", "int8"),
    *(product_paths.param(path, "qwen3", "bfloat16", cached)
      for path in paths.DENSE if path != "onednn" for cached in ("auto", "int8"))])
def test_a_recorded_step_is_the_step(family: str, kind: str, cached: str, path: str, tmp_path: Path) -> None:
    check_recorded(Pair(make(family, tmp_path), kind, cached=cached, path=path))


@pytest.mark.parametrize(("path", "quantization"), [("amx", "none"), ("amx_int8", "int8"), ("amx_int8", "int4")])
def test_a_recorded_step_on_tiles_is_the_step(
    path: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths for AMX, with tiles in software."""
    for linear in (linear_bf16, linear_blocks):
        monkeypatch.setattr(linear, "amx_obstacle", lambda: "")
    monkeypatch.setitem(linear_bf16.PRODUCT, "amx", linear_bf16.PRODUCT["software tiles"])
    monkeypatch.setitem(linear_blocks.PATHS, "amx_int8", linear_blocks.PATHS["software tiles"])
    pair = Pair(make("qwen3", tmp_path), "bfloat16", path=path, quantization=quantization)
    assert pair.decoder.kernels.product_path(torch.bfloat16) == path
    torch.manual_seed(0)
    for contexts in ([5, 300], [40], [301, 6], [250]):
        pair.check(contexts)


@product_paths.each(paths.QUANTIZED)
def test_a_recorded_step_of_quantized_weights_is_the_step(path: str, tmp_path: Path) -> None:
    check_recorded(Pair(make("qwen3", tmp_path), "bfloat16", path=path, quantization="int4"))


@product_paths.each(["onednn"])
def test_steps_that_torch_computes_a_part_of_are_left_to_others(path: str, tmp_path: Path) -> None:
    pair = Pair(make("qwen3", tmp_path), "bfloat16", path=path)
    for contexts in ([5, 9, 30], [5], [5, 9, 30]):
        assert pair.steps.logits(decode_batch(contexts, pair.decoder.config.vocab_size)) is None


def check_recorded(pair: Pair) -> None:
    torch.manual_seed(0)
    for rows in (3, 1, 16, 3):
        for longest in (20, 300, 600, 40):  # short ones run from recordings made for longer ones, and before them
            pair.check(torch.randint(1, longest, (rows,)).tolist())
    for drafts in ([2, 0, 3], [0, 5, 0], [1, 2, 2], [0, 0, 0], [4], [9], [0]):  # the first three by one recording
        for longest in (20, 300):
            pair.check(torch.randint(10, longest, (len(drafts),)).tolist(), drafts)


def test_a_step_of_slots_is_repeated(tmp_path: Path) -> None:
    """Also where rows with drafts began elsewhere in the step before."""
    pair = Pair(make("llama3", tmp_path), "float32", num_slots=4)
    joins = tuple(NewRequest(slot, slot, RequestSpec(range(9 * slot, 9 * slot + tokens), SamplingSpec()), ())
                  for slot, tokens in ((3, 38), (1, 6)))
    blocks = NewBlocks(3, 0, (40, 7, 21)), NewBlocks(1, 0, (5,))
    step = StepPlan(0, 0.0, (), joins, (), blocks, (3, 1), (3, 1), (37, 5), (1, 1), (), (1, 1), (RowKind.DECODE,) * 2,
                    (), (), (), (), None)
    pair.slots.apply(step)
    batch, targets = pair.slots.gather(step)
    expected = pair.computed(batch)
    assert pair.steps.repeat(step) is None, "it was not captured"
    pair.check([9, 40])
    pair.check([9, 40], drafts=[1, 0])
    repeated = pair.steps.repeat(step)
    assert repeated is not None
    assert torch.equal(repeated[0], expected) and torch.equal(repeated[1], targets)
    assert pair.steps.repeat(step._replace(num_logits=(1, 0))) is None, "the second row samples nothing"


def test_other_steps_are_left_to_others(tmp_path: Path) -> None:
    pair = Pair(make("llama3", tmp_path), "float32", num_slots=4)
    batch = decode_batch([5, 9, 30], 1000)
    chunk = RaggedBatch(
        torch.zeros(3, dtype=torch.int64), torch.arange(3), torch.arange(3), torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32), batch.block_tables[:1], torch.tensor([2]), 3, 3)
    assert pair.steps.logits(chunk) is None
    assert pair.steps.logits(decode_batch([5] * 5, 1000)) is None  # more rows than there are slots
    assert pair.steps.logits(batch) is not None

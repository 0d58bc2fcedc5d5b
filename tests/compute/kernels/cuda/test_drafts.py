"""Graphs of steps with drafts: one serves every way to spread as many tokens over as many rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from compute.runner.test_graphs import BLOCK, BLOCKS, WIDTH, decode_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.cuda_device import DEVICE, KERNELS, thinned
from support.cuda_ragged import moved
from support.paged import distance
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[4]))  # `benchmarks` is run from the root and never installed

from benchmarks.gpu.repeated import RepeatingGraph

from slotwise.compute.model.decoder import Decoder
from slotwise.compute.model.loading import load_model
from slotwise.compute.runner.decode_graphs import DecodeGraphs, num_graphs
from slotwise.compute.runner.input_batch import SlotTable

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}


@pytest.mark.parametrize("family", thinned("mistral", "qwen3", few=1))
@torch.inference_mode()
def test_a_graph_serves_drafts_however_they_are_spread(family: str, tmp_path: Path, monkeypatch) -> None:
    recorded: list[Callable[[], Tensor]] = []
    if DEVICE == "cpu":
        def record(work: Callable[[], Tensor]) -> RepeatingGraph:
            recorded.append(work)
            return RepeatingGraph(work)

        monkeypatch.setattr(KERNELS, "record", record)
    window = {"sliding_window": 20} if family == "mistral" else {}
    decoder = load_model(checkpoints.make(family, tmp_path, **SIZES | window), kernels=KERNELS, dtype="float32")
    caches = [KERNELS.allocate_cache(BLOCKS, BLOCK, shape, torch.float32) for shape in decoder.layer_shapes]
    for cache in caches:
        cache.storage.normal_()
    steps = DecodeGraphs(decoder, caches, SlotTable(8, WIDTH * BLOCK, BLOCK, BLOCKS - 1))
    for contexts, drafts in (([40, 9, 70], [2, 0, 3]), ([12, 33, 8], [0, 5, 0]), ([90, 7, 5], [1, 2, 2]),
                             ([25], [3]), ([31], [0]), ([40, 9, 70], [0, 0, 0])):
        batch = moved(decode_batch(contexts, 64, drafts))
        actual = steps.logits(batch)
        assert actual is not None
        expected = decoder.logits(decoder.hidden(batch, caches))
        assert distance(actual.cpu(), expected.cpu()) < 1e-5, drafts
    if DEVICE == "cpu":
        assert len(recorded) == 4, "the first three steps share a graph"


@pytest.mark.skipif(DEVICE == "cuda", reason="a capture computes nothing there")
def test_a_cold_start_captures_one_graph_for_each_size(monkeypatch) -> None:
    """Rows come one by one, each with a growing context: so many steps are captured, and none twice."""
    captured: list[int] = []

    def record(work: Callable[[], Tensor]) -> RepeatingGraph:
        captured.append(len(work()))
        return RepeatingGraph(work)

    monkeypatch.setattr(KERNELS, "record", record)
    decoder = SimpleNamespace(
        kernels=KERNELS, is_adapted=False, hidden=lambda batch, caches: batch.token_ids,
        logits=lambda hidden: hidden[:, None].float())
    steps = DecodeGraphs(cast(Decoder, decoder), [], SlotTable(40, 4 * BLOCK, BLOCK, 5))
    for _ in range(2):
        for rows in range(1, 41):
            logits = steps.logits(decode_batch([rows + 3] * rows, 64))
            assert logits is not None and len(logits) == rows
    assert captured == [1, 2, 4, 8, 16, 24, 32, 40]
    assert num_graphs(KERNELS, 40, 4 * BLOCK, drafts=False, adapters=False) == len(captured), "as memory is kept for"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20), st.integers(1, 9000)), min_size=1, max_size=30))
def test_no_more_graphs_are_captured_than_memory_is_kept_for(steps) -> None:
    sizes = set()
    for rows, drafts, context in steps:
        padded, longest = KERNELS.graph_size(rows + drafts, context)
        sizes.add((padded - drafts, padded, longest))
    assert len(sizes) <= num_graphs(KERNELS, 12, 9000, drafts=True, adapters=False)
    plain = {size for size in sizes if size[0] == size[1]}
    assert len(plain) <= num_graphs(KERNELS, 12, 9000, drafts=False, adapters=False) == 3 * 5

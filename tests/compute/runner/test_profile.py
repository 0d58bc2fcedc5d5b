"""Steps that only show how much memory they take."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from support import checkpoints
from support.rank_threads import Paired

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.reference import ReferenceKernels, draw
from slotwise.compute.model.loading import load_model
from slotwise.compute.runner.memory_budget import CAPTURES, batch_of_nothing, measured_graph, measured_workspace

BLOCK = 4


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 90))
def test_a_batch_of_nothing_is_a_batch(tokens, rows, longest):
    rows = min(rows, tokens)
    batch = batch_of_nothing(tokens, rows, longest, BLOCK, torch.device("cpu"))
    CheckedKernels(ReferenceKernels()).check_batch(batch)
    assert len(batch.token_ids) == tokens and len(batch.context_lens) == len(batch.sample_at) == rows
    assert set(batch.slot_mapping.tolist()) <= set(range(BLOCK)), "all of it lies in block 0"
    assert not batch.block_tables.any()
    assert batch.max_context_len >= longest
    assert batch.block_tables.shape[1] * BLOCK >= batch.max_context_len
    assert batch.context_lens.tolist() == batch.query_starts.diff().tolist()
    assert batch.sample_at.tolist() == (batch.query_starts[1:] - 1).tolist()


def test_the_largest_steps_are_run_and_added_up(tmp_path, monkeypatch):
    """Every step runs, twice, and its second run counts: the counters are a GPU's in name, the work is real."""
    decoder = load_model(checkpoints.make("qwen2", tmp_path), kernels=CheckedKernels(ReferenceKernels()))
    drawn, allocated = [], iter([100, 100, 300, 300])
    largest = iter([900, 700, 1000, 500])
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(largest))

    def watched(logits: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        drawn.append(logits.shape)
        return draw(logits, *given)

    total = measured_workspace(decoder, watched, BLOCK, [(50, 7, 90), (8, 8, 90)])
    assert total == (700 - 100) + (500 - 300)
    assert drawn == [(7, 1024), (7, 1024), (8, 1024), (8, 1024)]


class Captured:
    """A graph where none can be captured."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result


def test_a_graph_takes_what_is_gone_after_many_but_for_the_workspace(tmp_path, monkeypatch):
    """The device gives memory in pieces of 2 MiB; torch's own is none of a graph's.  Nothing stays captured."""
    alive, shapes, piece, ours = weakref.WeakSet(), [], 2 << 20, 700_000

    class Capturing(ReferenceKernels):
        def record(self, work):
            result = work()
            shapes.append(result.shape)
            alive.add(graph := Captured(result))
            return graph

    def free_and_total(device):
        taken = -(-len(alive) * ours // piece) * piece
        return (1 << 40) - taken - torch.cuda.memory_reserved(device), 1 << 40

    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5000 * len(shapes))
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    decoder = load_model(checkpoints.make("qwen2", tmp_path), kernels=CheckedKernels(Capturing()))
    found = measured_graph(decoder, BLOCK, 8, 90)
    assert abs(found - ours) <= piece // CAPTURES and not alive
    assert shapes == [(8, 1024)] * (1 + CAPTURES)


def test_ranks_measure_together(tmp_path, monkeypatch):
    """Each exchange of one rank has its counterpart on the other, and none is left."""
    folder = checkpoints.make("qwen2", tmp_path)
    given, barrier = [None, None], threading.Barrier(2)
    decoders = [load_model(folder, kernels=ReferenceKernels(), group=Paired(rank, given, barrier)) for rank in (0, 1)]
    for name, value in {"empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None,
                        "memory_allocated": 2, "max_memory_allocated": 9}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    with ThreadPoolExecutor(2) as pool:
        totals = list(pool.map(lambda decoder: measured_workspace(decoder, draw, BLOCK, [(50, 7, 90), (8, 8, 90)]),
                               decoders))
    assert totals == [14, 14] and not barrier.n_waiting


def test_nothing_is_taken_where_nothing_is_captured(tmp_path):
    decoder = load_model(checkpoints.make("qwen2", tmp_path), kernels=ReferenceKernels())
    assert measured_graph(decoder, BLOCK, 8, 90) == 0

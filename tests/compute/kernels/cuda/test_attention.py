"""Attention against the reference on ragged steps.  Every cache place of nobody's holds NaN, and all fresh memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES, geometry, thinned
from support.cuda_ragged import SMALL, apart, attend, caches
from support.paged import Layer

from slotwise.compute.kernels.cuda import attention
from slotwise.compute.kernels.cuda.configs import default_tuning
from slotwise.compute.kernels.interface import AttentionShape

KINDS = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # norm of the difference over norm
FLOATS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind).removeprefix("torch."))


@st.composite
def anything(draw):
    """Key heads, query heads to each, their size, a window, tokens to a block, and a type."""
    group = draw(st.integers(1, 8))
    return (
        draw(st.integers(1, 2)) if group < 4 else 1, group, draw(st.sampled_from([16, 64, 80, 96, 128, 256])),
        draw(st.sampled_from([0, 0, 1, 7, 20, 5000])), draw(st.sampled_from([1, 4, 16, 48])),
        draw(st.sampled_from(KINDS)))


geometries = geometry(
    anything(), (2, 4, 128, 0, 16, torch.bfloat16), (1, 7, 64, 0, 16, torch.float16), (2, 3, 80, 7, 4, torch.float32),
    (1, 8, 256, 20, 48, torch.bfloat16), (1, 1, 96, 0, 1, torch.float32))


@st.composite
def layers(draw, rows, most):
    """A layer of any geometry with at most `most` of the given kind of rows."""
    kv_heads, group, head_dim, window, block_size, kind = draw(geometries)
    return Layer(
        AttentionShape(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window,
                       is_causal=draw(st.sampled_from([True, True, False]))), block_size, kind,
        draw(st.lists(rows, min_size=1, max_size=most)), draw(st.integers(0, 1000)))


decodes = st.integers(1, 150).map(lambda context: (1, context))
chunks = st.tuples(st.integers(2, 24), st.integers(0, 60)).map(lambda row: (row[0], row[0] + row[1]))


@settings(max_examples=8 * EXAMPLES, deadline=None)
@given(layers(decodes, 2))
def test_decode_rows(layer):
    assert apart(layer) < CLOSE[layer.kind]


@settings(max_examples=8 * EXAMPLES, deadline=None)
@given(layers(chunks, 2))
def test_chunk_rows(layer):
    assert apart(layer) < CLOSE[layer.kind]


@settings(max_examples=5 * EXAMPLES, deadline=None)
@given(layers(st.one_of(decodes, chunks), 3), st.sampled_from([0, attention.SPLIT_TOKENS]))
def test_mixed_steps(layer, split_tokens):
    with patch.object(attention, "SPLIT_TOKENS", split_tokens):
        assert apart(layer) < CLOSE[layer.kind]


@pytest.mark.parametrize("group", range(1, 9))
def test_every_number_of_query_heads_to_a_key_head(group):
    assert apart(Layer(AttentionShape(group, 1, 64, 0.125), 16, torch.float32, [(1, 40), (9, 30)])) < 2e-6


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_size_of_head(head_dim):
    layer = Layer(AttentionShape(4, 2, head_dim, head_dim**-0.5), 16, torch.float32, [(1, 40), (9, 30)])
    assert apart(layer) < 2e-6


def test_contexts_around_the_edges_of_blocks_tiles_and_splits():
    edges = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257]
    assert apart(Layer(AttentionShape(1, 1, 64, 0.2), 16, torch.float32, [(1, context) for context in edges])) < 2e-6


@pytest.mark.parametrize("rows", [[(16, 16), (16, 32), (16, 33)], [(15, 40), (17, 17), (33, 47)]])
def test_chunks_around_the_edges_of_tiles(rows):
    assert apart(Layer(AttentionShape(1, 1, 64, 0.2), 16, torch.float32, rows)) < 2e-6


@pytest.mark.parametrize("window", [1, 16, 17, 33])
def test_windows_around_the_edges_of_tiles_and_splits(window):
    layer = Layer(AttentionShape(2, 1, 64, 0.2, window), 16, torch.float32, [(1, 90), (4, 90), (40, 90)])
    assert apart(layer) < 2e-6


@pytest.mark.parametrize("chunk", thinned(33, 16, 1, 90, few=2))
def test_chunks_of_the_context(chunk):
    shape = AttentionShape(2, 1, 64, 0.2, chunk, is_chunked=True)
    layer = Layer(shape, 16, torch.float32, [(1, 90), (1, 91), (4, 92), (40, 95), (33, 33)], has_sinks=chunk == 33)
    assert apart(layer) < 2e-6


@pytest.mark.parametrize(("soft_cap", "has_sinks", "window"), thinned(
    (1.5, False, 17), (0.0, True, 33), (1.5, True, 0), (1.5, False, 0), (0.0, True, 17), (1.5, True, 33),
    (1.5, False, 33), (0.0, True, 0), (1.5, True, 17), few=2))
def test_sinks_and_soft_caps(soft_cap, has_sinks, window):
    shape = AttentionShape(6, 2, 64, 0.2, window, soft_cap)
    layer = Layer(shape, 16, torch.float32, [(1, 90), (4, 90), (40, 90), (1, 5)], has_sinks=has_sinks)
    assert apart(layer) < 2e-6


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (17, 1.5)])
def test_biases(window, soft_cap):
    shape = AttentionShape(6, 2, 64, 0.2, window, soft_cap, has_biases=True)
    assert apart(Layer(shape, 16, torch.float32, [(1, 90), (4, 90), (40, 90), (1, 5)])) < 5e-6


@pytest.mark.parametrize(("split_tokens", "window"), thinned(
    (attention.SPLIT_TOKENS, 18), (0, 0), (attention.SPLIT_TOKENS, 0), (0, 18), few=2))
def test_rows_with_drafts_are_split_as_well(window, split_tokens, monkeypatch):
    """Rows as long as a tile holds, and one that is longer; in a step of too many tokens none is but decode rows."""
    monkeypatch.setattr(attention, "SPLIT_TOKENS", split_tokens)
    rows = [(3, 70), (2, 2), (1, 40), (5, 50), (6, 50)]
    assert apart(Layer(AttentionShape(6, 2, 64, 0.2, window), 16, torch.float32, rows)) < 2e-6


@pytest.mark.parametrize(("group", "short"), [(1, 16), (3, 5), (4, 4), (8, 2), (40, 1)])
def test_a_row_of_as_many_queries_as_the_smallest_tile_holds_is_split(group, short):
    """A row of one token always is; others only where there are few tokens."""
    shape, few = AttentionShape(2 * group, 2, 64, 0.1), attention.SPLIT_TOKENS
    assert attention.short_row(1, few, shape) == attention.short_row(5, few + 1, shape) == 1
    assert attention.short_row(5, few, shape) == short


@FLOATS
def test_the_sizes_it_is_served_with(kind):
    layer = Layer(AttentionShape(4, 1, 128, 0.1), 16, kind, [(1, 300), (70, 200), (2, 3)])
    assert apart(layer, default_tuning(128, kind)) < CLOSE[kind]


@FLOATS
def test_large_scores_do_not_overflow(kind):
    assert apart(Layer(AttentionShape(2, 1, 16, 40.0), 16, kind, [(3, 100), (1, 100), (20, 60)])) < 10 * CLOSE[kind]


@pytest.mark.parametrize("window", [0, 21])
def test_a_row_does_not_feel_its_batch_mates(window):
    rows = [(1, 40), (17, 40), (2, 50)]
    layer = Layer(AttentionShape(4, 2, 64, 0.125, window), 16, torch.float32, rows)
    together, (cache, _) = layer.batch(), caches(layer)
    query = layer.query(together)
    whole = attend(layer, together, query, cache)
    for i in range(len(rows)):
        mine = slice(int(together.query_starts[i]), int(together.query_starts[i + 1]))
        assert torch.equal(attend(layer, layer.batch(keep=[i]), query[mine], cache), whole[mine]), rows[i]


def test_a_launch_for_longer_contexts_and_more_rows_gives_the_same():
    """What a recorded step is: more programs than the step at hand needs, and rows of nothing behind."""
    layer = Layer(AttentionShape(4, 2, 64, 0.125), 16, torch.float32, [(1, 50), (1, 7)])
    batch, (cache, _) = layer.batch(), caches(layer)
    query = layer.query(batch)
    exact = attend(layer, batch, query, cache)
    padded = layer.batch(keep=[0, 1, 1, 1])
    query = query[[0, 1, 1, 1]]
    object.__setattr__(padded, "max_context_len", 512)
    assert torch.equal(attend(layer, padded, query, cache)[:2], exact)


def test_nothing_is_computed_for_a_step_without_tokens():
    layer = Layer(AttentionShape(4, 2, 64, 0.125), 16, torch.float32, [(1, 5)])
    cache, _ = caches(layer)
    assert attend(layer, layer.batch(), torch.empty(0, 4, 64), cache).shape == (0, 256)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(1, 16), st.sampled_from([16, 64, 128]))
def test_tiles_are_enough_for_any_rows(lengths, group, block_m):
    """The bound that spares asking the device how long rows are."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    firsts = [start * group // block_m + row for row, start in enumerate(starts)]
    needed = [-(-length * group // block_m) for length in lengths]
    assert all(firsts[row] + needed[row] <= firsts[row + 1] for row in range(len(lengths)))
    assert firsts[-1] == attention.num_tiles(starts[-1], len(lengths), group, block_m)


def test_grids_are_small_enough_to_launch():
    for rows in (1, 7, 512, 100_000):
        for visible, most in ((1_000_000, 31_250), (5000, 158)):
            segments = attention.num_segments(1_000_000, visible, SMALL.segment)
            assert 1 <= attention.num_programs(rows, 8, segments) <= segments == most


@pytest.mark.parametrize(("soft_cap", "has_sinks", "window"), thinned(
    (0.0, False, 40), (1.5, True, 21), (0.0, False, 0), (1.5, True, 1), (1.5, True, 0), (0.0, False, 21),
    (1.5, True, 40), (0.0, False, 1), few=2))
def test_a_position_does_not_depend_on_how_many_are_computed_with_it(soft_cap, has_sinks, window):
    """Segments of 32 positions: alone, in rows of a few tokens, and in a chunk."""
    shape = AttentionShape(4, 2, 64, 0.125, window, soft_cap, has_biases=has_sinks)
    layer = Layer(shape, 16, torch.float32, [(40, 100)], has_sinks=has_sinks)
    (cache, _), query = caches(layer), layer.query(layer.batch())
    whole = attend(layer, layer.batch(), query, cache)
    done = 0
    for size in (1, 1, 5, 16, 1, 2, 14):
        mine = slice(done, done + size)
        done += size
        assert torch.equal(attend(layer, layer.batch([(size, 60 + done)]), query[mine], cache), whole[mine]), size


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: places beyond 2**31 elements")
def test_a_cache_of_more_elements_than_32_bits_count():
    layer = Layer(AttentionShape(8, 8, 128, 0.1), 16, torch.bfloat16, [(1, 40), (40, 40)])
    batch, (cache, _) = layer.batch(), caches(layer)
    query = layer.query(batch)
    expected = attend(layer, batch, query, cache)
    blocks = 2**31 // cache.storage[0].numel() + layer.num_blocks
    large = type(cache)(torch.zeros(blocks, *cache.storage.shape[1:], dtype=layer.kind, device=DEVICE))
    large.storage[-layer.num_blocks :] = cache.storage
    batch.block_tables += blocks - layer.num_blocks
    assert torch.equal(attend(layer, batch, query, large), expected)

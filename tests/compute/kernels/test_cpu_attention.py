"""The CPU's attention and cache writes against the reference, on ragged steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import Layer, chunks, decodes, distance, layers, rotary

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import gemm
from slotwise.compute.kernels.interface import AttentionShape, QKNorm, RaggedBatch, SharedNorm
from slotwise.compute.kernels.reference import ReferenceKernels

CPU, REFERENCE = CpuKernels(threads=2), ReferenceKernels()
INT8 = CpuKernels(threads=2, kv_cache_dtype="int8")
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}  # norm of the difference over norm
FLOATS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def apart(layer: Layer) -> float:
    """Distance from the reference, with NaN in every cache place of nobody's."""
    batch = layer.batch()
    query = layer.query(batch)
    actual, expected = (
        kernels.attention(query, layer.filled_cache(kernels, math.nan), batch, layer.shape, layer.sinks, layer.biases)
        for kernels in (CPU, REFERENCE))
    return distance(actual, expected)


@settings(max_examples=30, deadline=None)
@given(layers(decodes))
def test_decode_rows(layer):
    assert apart(layer) < CLOSE[layer.kind]


@settings(max_examples=30, deadline=None)
@given(layers(chunks))
def test_chunk_rows(layer):
    assert apart(layer) < CLOSE[layer.kind]


@settings(max_examples=30, deadline=None)
@given(layers(st.one_of(decodes, chunks)))
def test_mixed_steps(layer):
    assert apart(layer) < CLOSE[layer.kind]


@FLOATS
@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
def test_every_context_around_the_edges_of_blocks_and_segments(block_size, kind):
    edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2048, 2049]
    layer = Layer(AttentionShape(6, 2, 32, 0.2), block_size, kind, [(1, context) for context in edges])
    assert apart(layer) < CLOSE[kind]


@FLOATS
def test_a_long_chunk_over_a_long_context(kind):
    assert apart(Layer(AttentionShape(9, 3, 64, 0.125), 64, kind, [(512, 2000), (1, 1999)])) < CLOSE[kind]


@pytest.mark.skipif(not gemm.pairs_pay(), reason="elsewhere all tests widen bfloat16")
@pytest.mark.parametrize("rows", [[(1, 70), (1, 1500), (5, 201)], [(130, 1201)]])
def test_bfloat16_widened_to_float32_where_it_is_multiplied_in_pairs(rows, monkeypatch):
    shape = AttentionShape(9, 3, 80, 0.2, window=301)  # an odd number of vectors, and odd edges
    layer = Layer(shape, 16, torch.bfloat16, rows)
    in_pairs = CPU.attention(layer.query(layer.batch()), layer.filled_cache(CPU), layer.batch(), shape)
    assert apart(layer) < CLOSE[layer.kind]
    monkeypatch.setattr(CPU, "_multiplies_pairs", False)
    assert apart(layer) < CLOSE[layer.kind]
    widened = CPU.attention(layer.query(layer.batch()), layer.filled_cache(CPU), layer.batch(), shape)
    assert not torch.equal(in_pairs, widened)


@FLOATS
def test_large_scores_do_not_overflow(kind):
    layer = Layer(AttentionShape(2, 1, 16, 40.0), 16, kind, [(3, 300), (1, 300)])
    assert apart(layer) < 10 * CLOSE[kind]


@FLOATS
@pytest.mark.parametrize("window", [0, 100, 1500])
def test_sinks_and_soft_caps_of_rows_in_segments(window, kind):
    shape = AttentionShape(6, 2, 32, 0.2, window, soft_cap=2.0)
    rows = [(1, 2100), (1, 3000), (1, 900), (40, 1300)]
    assert apart(Layer(shape, 16, kind, rows, has_sinks=True)) < CLOSE[kind]


@FLOATS
@pytest.mark.parametrize("chunk", [1, 48, 1024, 1500])
def test_chunks_of_the_context(chunk, kind):
    shape = AttentionShape(6, 2, 32, 0.2, chunk, is_chunked=True)
    rows = [(1, 1500), (1, 3000), (1, 3001), (1, 20), (130, 1540), (48, 48)]
    assert apart(Layer(shape, 16, kind, rows, has_sinks=chunk > 48)) < CLOSE[kind]


@FLOATS
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 2.0)])
def test_biases_of_rows_in_segments(window, soft_cap, kind):
    shape = AttentionShape(6, 2, 32, 0.2, window, soft_cap, has_biases=True)
    rows = [(1, 2100), (3, 3000), (1, 9), (40, 1300)]  # scores beyond 1000, which float32 rounds visibly
    assert apart(Layer(shape, 16, kind, rows, has_sinks=bool(window))) < max(4e-5, CLOSE[kind])


def test_what_is_not_supported_is_named():
    shape = AttentionShape(4, 2, 32, 0.2, soft_cap=50.0)
    assert not CPU.refusal(shape)
    int8 = CpuKernels(threads=1, kv_cache_dtype="int8")
    assert "kv_cache_dtype int8 does not support soft-capped" in int8.refusal(shape)
    assert "kv_cache_dtype int8 does not support attention scores with biases" in int8.refusal(
        AttentionShape(4, 2, 32, 0.2, has_biases=True))
    assert not int8.refusal(AttentionShape(4, 2, 32, 0.2, window=5))


@FLOATS
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_does_not_feel_its_batch_mates(kind, window, is_causal):
    rows = [(1, 2100), (1, 3), (17, 200), (1, 1024), (60, 60), (1, 1025)]
    layer = Layer(AttentionShape(9, 3, 64, 0.125, window, is_causal=is_causal), 16, kind, rows)
    cache, together = layer.filled_cache(CPU), layer.batch()
    query = layer.query(together)
    whole = CPU.attention(query, cache, together, layer.shape)
    for i in range(len(rows)):
        mine = slice(int(together.query_starts[i]), int(together.query_starts[i + 1]))
        alone = CPU.attention(query[mine], cache, layer.batch(keep=[i]), layer.shape)
        assert torch.equal(alone, whole[mine]), rows[i]


@FLOATS
@pytest.mark.parametrize("kernels", [CPU, INT8], ids=["floats", "int8"])
def test_a_row_of_a_large_decode_step_has_the_bits_of_a_lone_one(kernels, kind):
    """Heads are walked together in such a step, and by different threads where a row is alone."""
    rows = [(1, context) for context in (2100, 3, 64, 1024, 65, 1025, 200, 17, 128)]
    layer = Layer(AttentionShape(9, 3, 64, 0.125, window=1500), 64, kind, rows, has_sinks=True)
    cache, together = layer.filled_cache(kernels), layer.batch()
    query = layer.query(together)
    whole = kernels.attention(query, cache, together, layer.shape, layer.sinks)
    for i in range(len(rows)):
        alone = kernels.attention(query[i : i + 1], cache, layer.batch(keep=[i]), layer.shape, layer.sinks)
        assert torch.equal(alone, whole[i : i + 1]), rows[i]


@FLOATS
@pytest.mark.parametrize("window", [0, 1, 33, 1030])
def test_whole_rows_that_see_both_sides(kind, window):
    shape = AttentionShape(6, 2, 32, 0.2, window, is_causal=False)
    assert apart(Layer(shape, 16, kind, [(1, 1), (70, 70), (1100, 1100), (16, 16)])) < CLOSE[kind]


@st.composite
def one_row(draw):
    """A row around the edges of segments, and how many queries it computes at once, last ones last."""
    context = draw(st.sampled_from([1023, 1024, 1025, 2047, 2049, 2500, 4000]))
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 9, 17, 33, 64, 130]), min_size=1, max_size=7))
    window = draw(st.sampled_from([0, 0, 7, 100, 1000, 1500]))
    shape = AttentionShape(*draw(st.sampled_from([(9, 3), (4, 2), (8, 1)])), 32, 0.2, window, draw(
        st.sampled_from([0.0, 0.0, 2.0])), has_biases=draw(st.booleans()),
        is_chunked=window > 0 and draw(st.booleans()))
    kind = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    layer = Layer(shape, draw(st.sampled_from([16, 48, 64, 128])), kind, [(sum(sizes), context)],
                  draw(st.integers(0, 1000)), draw(st.booleans()))
    return layer, sizes


@settings(max_examples=30, deadline=None)
@given(one_row(), st.booleans())
def test_a_position_does_not_depend_on_how_many_are_computed_with_it(row, is_int8):
    layer, sizes = row
    kernels = INT8 if is_int8 and not (layer.shape.soft_cap or layer.shape.has_biases) else CPU
    options = layer.sinks, layer.biases
    (queries, context), = layer.rows
    cache, query = layer.filled_cache(kernels), layer.query(layer.batch())
    whole = kernels.attention(query, cache, layer.batch(), layer.shape, *options)
    done = 0
    for size in sizes:
        mine = slice(done, done + size)
        done += size
        part = layer.batch([(size, context - queries + done)])
        assert torch.equal(kernels.attention(query[mine], cache, part, layer.shape, *options), whole[mine]), size


@FLOATS
@pytest.mark.parametrize("context", [5, 70, 1026])
def test_a_draft_that_is_not_finite_leaves_the_positions_before_it(context, kind):
    layer = Layer(AttentionShape(6, 2, 32, 0.2), 16, kind, [(4, context)])
    batch, cache = layer.batch(), layer.filled_cache(CPU)
    query = layer.query(batch)
    expected = CPU.attention(query, cache, batch, layer.shape)
    last = RaggedBatch(batch.token_ids[-1:], batch.positions[-1:], batch.slot_mapping[-1:], torch.tensor([0, 1]).int(),
                       batch.context_lens, batch.block_tables, torch.tensor([0]), 1, context)
    draft = torch.full((1, 10 * 32), math.nan, dtype=kind)
    CPU.rotary_store(draft, rotary(32, context), last, cache, layer.shape, None)
    actual = CPU.attention(query, cache, batch, layer.shape)
    assert torch.equal(actual[:-1], expected[:-1])
    assert actual[-1].isnan().all()


@FLOATS
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128])
@pytest.mark.parametrize(("offset", "together", "shared"), [
    (None, False, False), (0.0, False, False), (1.0, False, False), (0.0, True, False), (0.5, True, True),
], ids=["no norm", "norm", "norm with an offset", "norm over all heads", "norm over the heads of all ranks"])
def test_rotary_store(kind, head_dim, offset, together, shared):
    layer = Layer(AttentionShape(6, 2, head_dim, 1.0), 16, kind, [(37, 37), (5, 60), (1, 9)])
    batch = layer.batch()
    queries, keys = (6, 2) if together else (1, 1)
    weights = 1 + layer.random(queries + keys, head_dim) / 4
    norm = None if offset is None else QKNorm(weights[:queries].flatten(), weights[queries:].flatten(), 1e-6, offset)
    qkv = layer.random(len(batch.positions), 10 * head_dim)
    if norm is not None and shared:
        elsewhere = torch.rand(len(qkv), 2) * 10 * head_dim
        norm = replace(norm, shared=SharedNorm(lambda own: own + elsewhere, (12 * head_dim, 3 * head_dim)))
    table = rotary(head_dim, 64)
    ours = CPU.allocate_cache(layer.num_blocks, 16, layer.shape, kind)
    theirs = REFERENCE.allocate_cache(layer.num_blocks, 16, layer.shape, kind)
    query = CPU.rotary_store(qkv, table, batch, ours, layer.shape, norm)
    assert distance(query, REFERENCE.rotary_store(qkv, table, batch, theirs, layer.shape, norm)) < CLOSE[kind] / 4
    keys, values = ours.keys_and_values(layer.shape)
    assert distance(keys, theirs.keys) < CLOSE[kind] / 4
    assert torch.equal(values, theirs.values)


def test_bytes_of_a_block_are_what_the_cache_takes():
    for kind in (torch.float32, torch.bfloat16):
        shape = AttentionShape(9, 3, 64, 1.0)
        cache = CPU.allocate_cache(10, 64, shape, kind)
        assert CPU.cache_bytes_per_block(64, shape, kind) * 10 == cache.storage.numel() * kind.itemsize

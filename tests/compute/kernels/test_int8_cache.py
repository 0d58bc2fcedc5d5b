"""Keys and values kept as int8: the CPU against the reference on the same whole numbers, and both against the truth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import HEAD_DIMS, Layer, chunks, decodes, distance, layers, rotary
from torch import Tensor

from slotwise.compute.kernels.cpu.cache import CpuCache
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import AttentionShape, QKNorm
from slotwise.compute.kernels.reference import QuantizedPagedCache, ReferenceKernels, quantize

CPU, REFERENCE = CpuKernels(threads=2, kv_cache_dtype="int8"), ReferenceKernels(kv_cache_dtype="int8")
EXACT = ReferenceKernels()
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}  # norm of the difference over norm, with the same whole numbers
HALF_A_STEP = 0.501  # of rounding, with what float32 itself loses
FLOATS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def as_the_reference_has_it(cache: CpuCache, shape: AttentionShape) -> QuantizedPagedCache:
    """The same whole numbers and scales."""
    return QuantizedPagedCache(
        torch.empty(0), cache.block_size, *cache.keys_and_values(shape), *cache.scales(shape))


def apart(layer: Layer) -> float:
    """Distance from the reference on the same whole numbers, with NaN for a scale in every place of nobody's."""
    batch, cache = layer.batch(), layer.filled_cache(CPU, math.nan)
    query = layer.query(batch)
    same = as_the_reference_has_it(cache, layer.shape)
    expected = REFERENCE.attention(query, same, batch, layer.shape, layer.sinks)
    return distance(CPU.attention(query, cache, batch, layer.shape, layer.sinks), expected)


@settings(max_examples=20, deadline=None)
@given(layers(st.one_of(decodes, chunks), (*HEAD_DIMS, 160), (0.0,)))
def test_attention_is_the_reference_s_on_the_same_numbers(layer):
    assert apart(layer) < CLOSE[layer.kind]


@FLOATS
@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("window", [0, 30])
def test_every_context_around_the_edges_of_blocks_and_segments(block_size, window, kind):
    edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]
    layer = Layer(AttentionShape(6, 2, 32, 0.2, window), block_size, kind, [(1, context) for context in edges])
    assert apart(layer) < CLOSE[kind]


@FLOATS
def test_a_long_chunk_over_a_long_context(kind):
    assert apart(Layer(AttentionShape(9, 3, 64, 0.125), 64, kind, [(512, 2000), (1, 1999)])) < CLOSE[kind]


@FLOATS
def test_a_row_does_not_feel_its_batch_mates(kind):
    rows = [(1, 700), (1, 3), (17, 200), (1, 256), (60, 60), (1, 257)]
    layer = Layer(AttentionShape(9, 3, 64, 0.125, 100), 16, kind, rows)
    cache, together = layer.filled_cache(CPU), layer.batch()
    query = layer.query(together)
    whole = CPU.attention(query, cache, together, layer.shape)
    for i in range(len(rows)):
        mine = slice(int(together.query_starts[i]), int(together.query_starts[i + 1]))
        alone = CPU.attention(query[mine], cache, layer.batch(keep=[i]), layer.shape)
        assert torch.equal(alone, whole[mine]), rows[i]


def read(cache: QuantizedPagedCache) -> tuple[Tensor, Tensor]:
    """All that a cache holds, as float32."""
    blocks, size = cache.keys.shape[:2]
    places = torch.arange(blocks * size)
    return cache.read(places // size, places % size)


@settings(max_examples=16, deadline=None)
@given(layers(chunks), st.booleans(), st.floats(-6, 6))
def test_what_is_stored_is_the_nearest_there_is(layer, with_norm, magnitude):
    """Scales follow the largest number, and no number is more than half a step from what it was."""
    shape, batch = layer.shape, layer.batch()
    weights = 1 + layer.random(2, shape.head_dim) / 4
    norm = QKNorm(weights[0], weights[1], 1e-6) if with_norm else None
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = layer.random(len(batch.positions), heads * shape.head_dim) * 10.0**magnitude
    table = rotary(shape.head_dim, batch.max_context_len)
    written = []
    for kernels in (CPU, REFERENCE):
        cache = kernels.allocate_cache(layer.num_blocks, layer.block_size, shape, layer.kind)
        query = kernels.rotary_store(qkv, table, batch, cache, shape, norm)
        written.append(as_the_reference_has_it(cache, shape) if kernels is CPU else cache)
    exact = EXACT.allocate_cache(layer.num_blocks, layer.block_size, shape, torch.float32)
    assert distance(query, EXACT.rotary_store(qkv, table, batch, exact, shape, norm)) < CLOSE[layer.kind]
    ours, theirs = written
    for name in ("key_scales", "value_scales"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=0)
    for name in ("keys", "values"):  # half way between two steps a number may go either way
        assert int((getattr(ours, name).int() - getattr(theirs, name).int()).abs().max()) <= 1
    for stored, whole, scales in zip(
            read(ours), (exact.keys, exact.values), (ours.key_scales, ours.value_scales), strict=True):
        away = (stored - whole.flatten(0, 1)).abs()
        assert bool((away <= HALF_A_STEP * scales.flatten(0, 1).unsqueeze(-1)).all())


def test_a_token_is_written_where_it_belongs_and_nowhere_else():
    shape = AttentionShape(4, 2, 32, 0.2)
    layer = Layer(shape, 16, torch.float32, [(1, 17), (3, 33)])
    cache, batch = layer.filled_cache(CPU), layer.batch()
    before = as_the_reference_has_it(cache, shape)
    qkv = layer.random(len(batch.positions), 8 * 32) + 5
    CPU.rotary_store(qkv, rotary(32, 64), batch, cache, shape, None)
    after = as_the_reference_has_it(cache, shape)
    changed = torch.zeros(layer.num_blocks * 16, dtype=torch.bool)
    changed[batch.slot_mapping] = True
    for old, new in zip(before[2:], after[2:], strict=True):
        differs = (old != new).flatten(0, 1).flatten(1).any(1)
        assert torch.equal(differs, changed)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(bad):
    shape = AttentionShape(4, 2, 32, 0.2)
    layer = Layer(shape, 16, torch.float32, [(3, 3)])
    batch, qkv = layer.batch(), layer.random(3, 8 * 32)
    qkv[1, 4 * 32 + 7] = bad  # a key
    qkv[2, 6 * 32 + 9] = bad  # a value
    for kernels in (CPU, REFERENCE):
        cache = kernels.allocate_cache(layer.num_blocks, 16, shape, torch.float32)
        kernels.rotary_store(qkv, rotary(32, 4), batch, cache, shape, None)
        stored = as_the_reference_has_it(cache, shape) if kernels is CPU else cache
        keys, values = (part[batch.slot_mapping].isfinite().all(-1) for part in read(stored))
        assert keys.tolist() == [[True, True], [False, True], [True, True]]
        assert values.tolist() == [[True, True], [True, True], [False, True]]


def test_zeros_stay_zeros():
    shape = AttentionShape(2, 1, 16, 1.0)
    layer = Layer(shape, 4, torch.bfloat16, [(5, 5)])
    batch, cache = layer.batch(), CPU.allocate_cache(layer.num_blocks, 4, shape, torch.bfloat16)
    CPU.rotary_store(torch.zeros(5, 64).bfloat16(), rotary(16, 8), batch, cache, shape, None)
    assert not CPU.attention(layer.query(batch), cache, batch, shape).any()
    steps, scales = quantize(torch.zeros(3, 16))
    assert not steps.any() and not scales.any()


@FLOATS
def test_attention_is_near_what_it_would_be_with_all_digits(kind):
    layer = Layer(AttentionShape(9, 3, 64, 0.125), 64, kind, [(1, 700), (40, 300), (1, 64)])
    batch = layer.batch()
    query = layer.query(batch)
    exact = EXACT.attention(query, layer.filled_cache(EXACT), batch, layer.shape)
    for kernels in (CPU, REFERENCE):
        assert 1e-4 < distance(kernels.attention(query, layer.filled_cache(kernels), batch, layer.shape), exact) < 0.012


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_bytes_of_a_block_are_what_the_cache_takes_and_about_half(kernels):
    shape = AttentionShape(9, 3, 64, 1.0)
    for kind, share in ((torch.bfloat16, 2), (torch.float32, 4)):
        pieces = kernels.cache_pieces(kernels.allocate_cache(10, 64, shape, kind))
        size = kernels.cache_bytes_per_block(64, shape, kind)
        assert size * 10 == sum(piece.nbytes for piece in pieces) == 10 * 64 * 3 * 2 * (64 + 4)
        assert size * share < 1.07 * EXACT.cache_bytes_per_block(64, shape, kind)
        assert len({piece.dtype for piece in pieces}) == 1, "blocks are moved as one kind of number"


@pytest.mark.parametrize(("make", "kept"), [
    (CpuKernels, "auto or int8 on device cpu"), (ReferenceKernels, "auto or int8 or fp8 on device reference")])
def test_another_kind_is_refused(make, kept):
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be {kept}, not 'int4'"):
        make(kv_cache_dtype="int4")

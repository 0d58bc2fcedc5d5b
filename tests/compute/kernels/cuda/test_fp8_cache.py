"""A cache of fp8, which has no scales: what is written to it, and attention over it, against the reference.

The interpreter rounds what lies in the middle of two fp8 away from zero, what is rounded up to a power of two down to
the one before, what is smallest to zero, and makes a number of a NaN.
"""

from __future__ import annotations

import pytest
import torch
from support.cuda_device import DEVICE
from support.cuda_ragged import attend, moved
from support.paged import Layer, distance, rotary

from slotwise.compute.kernels.cuda import CudaKernels
from slotwise.compute.kernels.cuda.attention import CudaCache
from slotwise.compute.kernels.interface import FP8_LARGEST, AttentionShape
from slotwise.compute.kernels.reference import ReferenceKernels, as_bytes

if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("this GPU has no fp8", allow_module_level=True)

KERNELS, REFERENCE = CudaKernels(DEVICE, kv_cache_dtype="fp8"), ReferenceKernels(kv_cache_dtype="fp8")
EXACT = ReferenceKernels()
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # norm of the difference over norm
FLOATS = pytest.mark.parametrize("kind", list(CLOSE), ids=lambda kind: str(kind).removeprefix("torch."))


def filled(layer: Layer) -> CudaCache:
    """What the reference holds of every row's context; NaN in every place that belongs to nobody."""
    theirs = layer.filled_cache(REFERENCE, float("nan"))
    ours = KERNELS.allocate_cache(layer.num_blocks, layer.block_size, layer.shape, layer.kind)
    as_bytes(ours.storage).copy_(torch.stack((as_bytes(theirs.keys), as_bytes(theirs.values)), 1).transpose(2, 3))
    return ours


@FLOATS
@pytest.mark.parametrize("window", [0, 21])
def test_attention(kind, window):
    layer = Layer(AttentionShape(6, 2, 80, 80**-0.5, window), 16, kind, [(1, 70), (20, 45), (2, 2), (1, 1)])
    batch = layer.batch()
    query, theirs = layer.query(batch), layer.filled_cache(REFERENCE, float("nan"))
    expected = REFERENCE.attention(query, theirs, batch, layer.shape)
    assert distance(attend(layer, batch, query, filled(layer)), expected) < CLOSE[kind]
    exact = EXACT.attention(query, layer.filled_cache(EXACT), batch, layer.shape)
    assert 1e-3 < distance(expected, exact) < 0.05


@FLOATS
def test_what_is_written_is_the_nearest_and_no_other_place_is_touched(kind):
    layer = Layer(AttentionShape(6, 2, 64, 1.0), 16, kind, [(2, 2), (1, 40), (1, 17)])
    batch = layer.batch()
    qkv, table = layer.random(len(batch.positions), 10 * 64), rotary(64, 64)
    ours, theirs = (k.allocate_cache(layer.num_blocks, 16, layer.shape, kind) for k in (KERNELS, REFERENCE))
    query = KERNELS.rotary_store(qkv.to(DEVICE), table.to(DEVICE), moved(batch), ours, layer.shape, None)
    expected = REFERENCE.rotary_store(qkv, table, batch, theirs, layer.shape, None)
    assert query.dtype == kind and ours.storage.dtype == torch.float8_e4m3fn
    assert distance(query.cpu(), expected) < 2 * CLOSE[kind]
    keys, values = (tensor.cpu().float() for tensor in ours.keys_and_values())
    if DEVICE == "cuda":
        assert torch.equal(values, theirs.values.float())
    for actual, wanted in ((values, theirs.values.float()), (keys, theirs.keys.float())):
        alike = (torch.frexp(wanted).mantissa.abs() != 0.5) | torch.tensor(DEVICE == "cuda")
        assert distance(actual[alike], wanted[alike]) < 0.03, "all but those in the middle of two"
        assert not actual[wanted == 0].any()


@pytest.mark.parametrize("kernels", [KERNELS, REFERENCE], ids=["cuda", "reference"])
def test_what_is_too_large_is_the_largest_and_what_is_no_number_stays_none(kernels):
    no_number = 1.0 if kernels is KERNELS and DEVICE == "cpu" else float("nan")
    numbers = torch.tensor([1e6, -1e6, 470.0, float("inf"), no_number, 1.0, -3.0, 0.0]).repeat(6)[None]
    layer, device = Layer(AttentionShape(1, 1, 16, 1.0), 16, torch.float32, [(1, 1)]), kernels.device
    batch, cache = layer.batch(), kernels.allocate_cache(layer.num_blocks, 16, layer.shape, torch.float32)
    step = moved(batch) if kernels is KERNELS else batch
    kernels.rotary_store(numbers.to(device), rotary(16, 1).to(device), step, cache, layer.shape, None)
    values = (cache.keys_and_values()[1] if kernels is KERNELS else cache.values).cpu().float()
    place = int(batch.slot_mapping[0])
    expected = torch.tensor([FP8_LARGEST, -FP8_LARGEST, FP8_LARGEST, FP8_LARGEST, no_number, 1.0, -3.0, 0.0])
    torch.testing.assert_close(values[place // 16, place % 16, 0, :8], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernels", [KERNELS, REFERENCE], ids=["cuda", "reference"])
def test_a_block_takes_half_of_what_bfloat16_does(kernels):
    shape = AttentionShape(9, 3, 64, 1.0)
    pieces = kernels.cache_pieces(kernels.allocate_cache(10, 16, shape, torch.bfloat16))
    size = kernels.cache_bytes_per_block(16, shape, torch.bfloat16)
    assert 10 * size == sum(piece.nbytes for piece in pieces)
    assert 2 * size == EXACT.cache_bytes_per_block(16, shape, torch.bfloat16)
    assert {piece.dtype for piece in pieces} == {torch.int8}, "blocks are moved as bytes"


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or fp8 on device cuda, not 'int8'"):
        CudaKernels(DEVICE, kv_cache_dtype="int8")

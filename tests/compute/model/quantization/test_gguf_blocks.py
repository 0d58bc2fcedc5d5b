"""Every block type against the `gguf` package's own dequantizer, bit for bit: random bytes are valid blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slotwise.compute.kernels.matrix import QuantizedMatrix, StackedMatrix, stacked
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES

TYPES = pytest.mark.parametrize("name", BLOCK_TYPES)


def random_bytes(name: str, outputs: int, depth: int, seed: int) -> Tensor:
    size = outputs * BLOCK_TYPES[name].row_bytes(depth)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def random_matrix(name: str, outputs: int, depth: int, seed: int = 0) -> QuantizedMatrix:
    return BLOCK_TYPES[name].matrix(random_bytes(name, outputs, depth, seed), outputs, depth)


def bits(x: Tensor) -> Tensor:
    """Every NaN as one; all other numbers as they are, zeros with their sign."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@TYPES
def test_a_block_has_ggmls_size(name):
    kind = BLOCK_TYPES[name]
    assert (kind.weights, kind.bytes) == GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@TYPES
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_weights_are_what_gguf_says(name, outputs, blocks, seed):
    depth = blocks * BLOCK_TYPES[name].weights
    data = random_bytes(name, outputs, depth, seed)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(data.view(outputs, -1).numpy(), GGMLQuantizationType[name]))
    actual = BLOCK_TYPES[name].matrix(data, outputs, depth).dequantized()
    assert actual.shape == (outputs, depth) and torch.equal(bits(actual), bits(expected))


def test_every_scale_of_mxfp4():
    data = torch.zeros(256, 17, dtype=torch.uint8)
    data[:, 0], data[:, 1:] = torch.arange(256), 0x72
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType.MXFP4))
    assert torch.equal(bits(BLOCK_TYPES["MXFP4"].matrix(data, 256, 32).dequantized()), bits(expected))


@TYPES
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 7), st.integers(1, 8))
def test_a_range_of_outputs_is_a_range_of_the_whole(name, first, count):
    matrix = random_matrix(name, 16, 256)
    part = matrix.dequantized(first, first + count)
    assert torch.equal(bits(part), bits(matrix.dequantized()[first : first + count]))


@TYPES
def test_rows_hold_what_the_format_says(name):
    matrix = random_matrix(name, 3, 512)
    rows, kind = matrix.read(1, 3), matrix.format
    assert rows.codes.dtype == torch.uint8 and int(rows.codes.max()) < 1 << kind.bits
    for factors in (rows.scales, *([] if rows.minimums is None else [rows.minimums])):
        assert factors.values.dtype == kind.scale and factors.values.shape == (2, matrix.groups)
        assert (factors.units is None) == (not kind.groups_per_unit)
        if factors.units is not None:
            assert factors.units.shape == (2, matrix.groups // kind.groups_per_unit)
            assert factors.units.dtype == torch.float16
    assert (rows.minimums is not None) == kind.has_minimums


@pytest.mark.parametrize(("outputs", "depth", "why"), [
    (2, 576, "not whole blocks of 256"), (3, 512, "take 864 bytes, not 576"), (2, 0, "not whole blocks")])
def test_data_of_another_size_is_refused(outputs, depth, why):
    with pytest.raises(ValueError, match=why):
        BLOCK_TYPES["Q4_K"].matrix(random_bytes("Q4_K", 2, 512, 0), outputs, depth)


@TYPES
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 12), st.integers(1, 8))
def test_matrices_of_one_format_are_stacked_to_one(name, first, count):
    parts = [random_matrix(name, outputs, 256, outputs) for outputs in (4, 7, 9)]
    whole = stacked(parts)
    assert isinstance(whole, QuantizedMatrix) and whole.shape == (20, 256)
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(bits(whole.dequantized(first, first + count)), bits(expected[first : first + count]))


def test_matrices_of_several_formats_are_stacked():
    parts = [random_matrix("Q4_K", 4, 256), random_matrix("Q6_K", 3, 256)]
    whole = stacked(parts)
    assert isinstance(whole, StackedMatrix) and whole.shape == (7, 256)
    assert torch.equal(bits(whole.dequantized()), bits(torch.cat([part.dequantized() for part in parts])))
    with pytest.raises(ValueError, match="cannot be stacked"):
        stacked([parts[0], random_matrix("Q4_K", 4, 512)])

"""Products with quantized matrices of every format, their tables and heads, against the matrices dequantized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_device import DEVICE, EXAMPLES, KERNELS, interpreted, thinned
from support.paged import distance
from support.quantized_matrices import FORMATS, depth_of, random_matrix

from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, StackedMatrix

with interpreted():
    from slotwise.compute.kernels.cuda import CudaKernels, narrow, packed

INT8 = Format(8, 0, torch.float32, zero=128)
CLOSE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3 if DEVICE == "cuda" else 2e-2}


def numbers(kind: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(kind)


def without_nan(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same without the two codes that are no number as 8-bit floats."""
    def read(first: int, end: int) -> Rows:
        rows = matrix.read(first, end)
        return rows._replace(codes=rows.codes.where(rows.codes & 0x7F != 0x7F, 0))

    return replace(matrix, read=read)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_products_of_every_format(name, tokens):
    kind = FORMATS[name]
    matrix = random_matrix(kind, 45, depth_of(kind, 272))
    x, bias = numbers(torch.float32, tokens, matrix.depth), numbers(torch.float32, 45)
    product = KERNELS.head(matrix) if name == "FP8" else KERNELS.linear(matrix, bias.to(DEVICE))
    expected = x.double() @ matrix.dequantized().double().T + (0 if name == "FP8" else bias.double())
    assert distance(product(x.to(DEVICE)).cpu(), expected) < CLOSE[torch.float32]


@pytest.mark.parametrize(("name", "tokens", "has_bias"), thinned(
    ("Q4_K", 9, True), ("GPTQ", 1, True), ("GPTQ", 9, False), ("FP8 blocks", 1, False), ("Q4_K", 1, False),
    ("Q4_K", 1, True), ("Q4_K", 9, False), ("GPTQ", 1, False), ("GPTQ", 9, True), ("FP8 blocks", 1, True),
    ("FP8 blocks", 9, False), ("FP8 blocks", 9, True), few=4))
def test_products_split_along_their_depth(name, tokens, has_bias, monkeypatch):
    """The last part is shorter; a bias is added once; and split or not, the product is the same but for rounding."""
    matrix = random_matrix(FORMATS[name], 45, depth_of(FORMATS[name], 2100))
    x, bias = numbers(torch.float32, tokens, matrix.depth).to(DEVICE), numbers(torch.float32, 45).to(DEVICE)
    product, made = KERNELS.linear(matrix, bias if has_bias else None), []
    add = packed.add_parts
    monkeypatch.setattr(packed, "add_parts", lambda out, parts, bias: made.append(len(parts)) or add(out, parts, bias))
    split = product(x)
    monkeypatch.setattr(packed, "ENOUGH_PROGRAMS", 1)
    assert distance(split.cpu(), product(x).cpu()) < CLOSE[torch.float32] and made[0] > 2 and len(made) == 1


@given(st.integers(1, 2000), st.integers(1, 30_000), st.sampled_from([16, 64, 128]))
def test_parts_are_all_of_a_depth_and_none_is_empty(programs, depth, step):
    out = torch.empty(3, 5, dtype=torch.bfloat16)
    parts = packed.SplitProduct.of(out, (1, programs), depth, step)
    assert (parts.number - 1) * parts.depth < depth <= parts.number * parts.depth
    assert parts.number * programs <= max(programs, packed.ENOUGH_PROGRAMS)
    assert parts.sums is out if parts.number == 1 else parts.sums.shape == (parts.number, 3, 5)
    assert parts.number == 1 or parts.depth % step == 0
    assert packed.SplitProduct.of(out.new_empty(17, 5), (1, programs), depth, step).number == 1, "many tokens"


@pytest.mark.parametrize("kind", CLOSE, ids=str)
@pytest.mark.parametrize("name", ["Q4_K", "GPTQ", "FP8 blocks"])
def test_products_of_every_type(kind, name):
    matrix = random_matrix(FORMATS[name], 24, 256)
    x = numbers(kind, 3, 256)
    expected = x.double() @ matrix.dequantized().double().T
    assert distance(KERNELS.linear(matrix)(x.to(DEVICE)).cpu(), expected) < CLOSE[kind]


@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 70), st.integers(1, 300), st.integers(1, 40), st.booleans())
def test_any_size_and_order(name, outputs, least, tokens, is_ordered):
    kind = FORMATS[name]
    matrix = random_matrix(kind, outputs, depth_of(kind, least), is_ordered=is_ordered)
    x = numbers(torch.float32, tokens, matrix.depth)
    expected = x.double() @ matrix.dequantized().double().T
    assert distance(KERNELS.head(matrix)(x.to(DEVICE)).cpu(), expected) < CLOSE[torch.float32]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_rows_of_a_table(name, is_ordered):
    kind = FORMATS[name]
    table = random_matrix(kind, 60, depth_of(kind, 272), is_ordered=is_ordered)
    ids = torch.tensor([3, 59, 0, 3, 17])
    found = KERNELS.embedding(table, torch.float32, 5.5)(ids.to(DEVICE)).cpu()
    torch.testing.assert_close(found, table.dequantized()[ids] * 5.5, rtol=3e-6, atol=1e-7)


def test_ids_outside_a_table_are_clamped():
    look_up = KERNELS.embedding(random_matrix(FORMATS["Q4_K"], 50, 256), torch.float32)
    ids = torch.tensor([3, 50, 1 << 40, -1, -(1 << 62)], device=DEVICE)
    assert torch.equal(look_up(ids), look_up(torch.tensor([3, 49, 49, 0, 0], device=DEVICE)))


@pytest.mark.parametrize("kind", CLOSE, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(("form", "capability", "depth"), [
    (INT8, 80, 200), (FORMATS["FP8"], 90, 200), (INT8, 80, 2200)])
def test_products_of_8_bits_with_8_bits(kind, tokens, form, capability, depth, monkeypatch):
    """Exact products of codes: all that differs from the contract is the rounding of tokens to 8 bits.

    The deepest is split into parts.
    """
    monkeypatch.setattr(KERNELS, "_capability", capability)
    matrix, x, bias = without_nan(random_matrix(form, 45, depth)), numbers(kind, tokens, depth), numbers(kind, 45)
    actual = KERNELS.linear(matrix, bias.to(DEVICE))(x.to(DEVICE)).cpu()
    storage = torch.int8 if form is INT8 else torch.float8_e4m3fn
    codes, scales = (tensor.cpu() for tensor in narrow.quantized_rows(x.to(DEVICE), storage, depth + 8))
    assert (codes[:, depth:].float() == 0).all()
    rounded = codes[:, :depth].double() * scales.double()[:, None]
    off = (rounded - x.double()).abs()
    if form is INT8:
        assert (off <= scales.double()[:, None] * 0.501).all()
    else:  # the interpreter halves a number whose rounding carries into its exponent
        assert (off <= x.double().abs() / (15.9 if DEVICE == "cuda" else 1.99) + scales.double()[:, None] / 256).all()
    assert distance(actual, rounded @ matrix.dequantized().double().T + bias.double()) < CLOSE[kind]


def test_8_bit_products_of_unsound_and_empty_tokens():
    product = KERNELS.linear(random_matrix(INT8, 20, 64))
    x = numbers(torch.float32, 4, 64).to(DEVICE)
    expected = product(x)
    x[1, 7], x[2] = float("nan"), 0.0
    actual = product(x)
    assert actual[1].isnan().all() and (actual[2] == 0).all()
    assert torch.equal(actual[::3], expected[::3])
    assert product(x[:0]).shape == (0, 20)
    assert KERNELS.head(random_matrix(INT8, 20, 64))(x[:0]).shape == (0, 20)


@pytest.mark.parametrize(("name", "capability", "wanted"), [
    ("FP8", 80, False), ("FP8", 89, True), ("FP8 blocks", 90, False), ("GPTQ 8", 90, False), ("Q8_0", 90, False)])
def test_which_products_quantize_their_tokens(name, capability, wanted):
    assert narrow.is_narrow(FORMATS[name], capability) == wanted
    assert narrow.is_narrow(INT8, capability)


def test_formats_side_by_side_and_gated():
    parts = [random_matrix(FORMATS["Q4_K"], 30, 256), random_matrix(FORMATS["Q6_K"], 10, 256)]
    x, bias = numbers(torch.float32, 3, 256), numbers(torch.float32, 40)
    stacked = StackedMatrix(tuple(parts))
    expected = x.double() @ stacked.dequantized().double().T + bias.double()
    assert distance(KERNELS.linear(stacked, bias.to(DEVICE))(x.to(DEVICE)).cpu(), expected) < CLOSE[torch.float32]
    gate, up = expected.chunk(2, 1)
    gated = KERNELS.gated(stacked, bias.to(DEVICE))(x.to(DEVICE)).cpu()
    assert distance(gated, torch.nn.functional.silu(gate) * up) < 1e-5
    assert KERNELS.linear_bytes(stacked) == sum(map(KERNELS.linear_bytes, parts))


def test_a_head_and_the_table_of_one_matrix_share_memory():
    kernels, matrix = CudaKernels(DEVICE), random_matrix(INT8, 64, 128)
    look_up, head = kernels.embedding(matrix, torch.float32), kernels.head(matrix)
    (one,) = kernels._packed.values()
    x = numbers(torch.float32, 2, 128).to(DEVICE)
    assert distance(head(x).cpu(), x.cpu().double() @ look_up(torch.arange(64, device=DEVICE)).cpu().double().T) < 1e-5
    assert one.codes.shape == (64, 128)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_bytes_are_those_of_its_tensors(name):
    kind = FORMATS[name]
    matrix = random_matrix(kind, 48, depth_of(kind, 300))
    found = packed.pack(matrix, torch.device(DEVICE))
    factors = [*found.scales, *(found.minimums or ())]
    held = found.codes.nbytes + sum(tensor.nbytes for tensor in factors if tensor is not None)
    assert held == packed.packed_bytes(kind, 48, matrix.depth) == KERNELS.head_bytes(matrix)


def test_a_format_that_cannot_be_multiplied_is_refused_by_name():
    matrix = random_matrix(Format(4, 24, torch.float32), 8, 48)
    assert "groups of 24 inputs" in KERNELS.format_refusal(matrix.format, torch.bfloat16)
    for work in (KERNELS.linear, KERNELS.head, lambda matrix: KERNELS.embedding(matrix, torch.float32)):
        with pytest.raises(ValueError, match="groups of 24"):
            work(matrix)

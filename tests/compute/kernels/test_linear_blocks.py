"""Products with quantized matrices against plain torch doing the same arithmetic, and against what they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import product_paths
from support.paged import distance
from support.quantized_matrices import random_matrix, rounded_activations
from torch import Tensor

from slotwise.compute.kernels.checked import CheckedKernels
from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.cpu.products.block_layout import layout_of, levels_of
from slotwise.compute.kernels.cpu.products.linear_blocks import blocks_linear, pack_blocks
from slotwise.compute.kernels.matrix import Format, QuantizedMatrix, Rows, StackedMatrix, stacked
from slotwise.compute.kernels.reference import ReferenceKernels
from slotwise.compute.model.gguf.block_types import BLOCK_TYPES

PATHS = product_paths.each(paths.QUANTIZED)
ROUNDED = {torch.float32: 5e-6, torch.bfloat16: 2**-8 * 1.01}
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FORMATS = {
    **{name: kind.format for name, kind in BLOCK_TYPES.items()},
    "4 bits of 128 in bfloat16": Format(4, 128, torch.bfloat16, zero=8),
    "4 bits of 64 with zeros": Format(4, 64, torch.float32, has_minimums=True),
    "8 bits of 128": Format(8, 128, torch.float16, zero=128),
    "8 bits of a row": Format(8, 0, torch.float32, zero=128),
    "7 bits of 512": Format(7, 512, torch.float32, zero=64),
    "4 bits of 16": Format(4, 16, torch.float16, zero=8),
    "4 bits of 48": Format(4, 48, torch.float16, zero=8),
    "1 bit of 32": Format(1, 32, torch.float16, has_minimums=True),
    "MXFP4 in halves": Format(4, 32, torch.bfloat16, levels=E2M1),
    "NF4": Format(4, 64, torch.float32, levels=NF4),
}
KINDS = {name: (torch.bfloat16, torch.float32)[place % 2] for place, name in enumerate(FORMATS)}
"""The type of activations with which a format is tested: each pair of both is a kernel to compile."""
ALL = pytest.mark.parametrize("name", FORMATS)
TABLES = pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "IQ4_NL", "NF4",
                                          "4 bits of 64 with zeros", "8 bits of a row"])


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def depth_of(name: str, least: int) -> int:
    """The next depth that the format can have."""
    kind = FORMATS[name]
    whole = kind.group * kind.groups_per_unit or 1
    return -(-least // whole) * whole


def of(name: str, outputs: int, depth: int, **options) -> QuantizedMatrix:
    return random_matrix(FORMATS[name], outputs, depth, **options)


def kernels_of(path: str, threads: int = 2) -> CpuKernels:
    return CpuKernels(threads, path=path)


def error(actual: Tensor, matrix: QuantizedMatrix, x: Tensor, bias: Tensor | None = None) -> float:
    """The distance of a product from the same arithmetic in plain torch."""
    activations, undecided = rounded_activations(x, layout_of(matrix.format).unit, matrix.order)
    levels = levels_of(matrix.format)
    if levels.table:  # levels that are no multiples of a half (NF4) are rounded
        rounded = tuple((level - levels.zero) * levels.factor for level in levels.table)
        matrix = replace(matrix, format=replace(matrix.format, levels=rounded))
    weight, actual = matrix.dequantized().double().T, actual.double()
    wanted, off = activations @ weight, undecided @ weight.abs()
    wanted += 0 if bias is None else bias.double()
    size = (activations.square() @ weight.square()).sum().sqrt()  # of sums whose products do not cancel
    nearest = torch.clamp(actual, wanted - off, wanted + off)
    return float((actual - nearest).norm() / torch.maximum(size, wanted.norm()).clamp_min(1e-30))


@ALL
@settings(max_examples=3, deadline=None)
@given(st.integers(1, 70), st.integers(1, 700), st.integers(1, 110), st.booleans())
@example(49, 600, 105, True)  # rows, groups and outputs that fill no tile, behind some that do
@example(1, 1, 1, False)
def test_products(name, tokens, least, outputs, with_bias):
    depth, kind = depth_of(name, least), KINDS[name]
    matrix, x = of(name, outputs, depth, seed=tokens), numbers(tokens, depth).to(kind)
    bias = numbers(outputs).to(kind) if with_bias else None
    actual = CpuKernels(2).linear(matrix, bias)(x)
    assert actual.dtype == kind and error(actual, matrix, x, bias) < ROUNDED[kind]


@pytest.mark.parametrize("depth", [576, 1536])
@pytest.mark.parametrize("name", ["Q5_0", "Q8_0", "4 bits of 64 with zeros"])
def test_widths_of_small_models(name, depth):
    matrix, x = of(name, 96, depth), numbers(5, depth)
    assert error(CpuKernels(2).linear(matrix)(x), matrix, x) < 5e-6


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
@settings(max_examples=6, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 40), st.integers(1, 70), st.booleans())
def test_gated_products(name, kind, tokens, size, with_bias):
    """What is gated is not rounded first, so the same product in float32 tells what to expect."""
    depth = depth_of(name, 200)
    matrix, x = of(name, 2 * size, depth), numbers(tokens, depth).to(kind)
    bias = numbers(2 * size).to(kind) if with_bias else None
    kernels = CpuKernels(2)
    gate, up = kernels.linear(matrix, None if bias is None else bias.float())(x.float()).double().chunk(2, dim=1)
    assert distance(kernels.gated(matrix, bias)(x), F.silu(gate) * up) < 5 * ROUNDED[kind]
    in_steps = kernels.gated(matrix, bias, "gelu_tanh")(x)
    assert distance(in_steps, F.gelu(gate, approximate="tanh") * up) < 10 * ROUNDED[kind]


@ALL
def test_a_product_is_close_to_what_it_stands_for(name):
    depth = depth_of(name, 512)
    matrix, x = of(name, 96, depth), numbers(50, depth).to(KINDS[name])
    assert distance(CpuKernels(2).linear(matrix)(x).float(), x.float() @ matrix.dequantized().T) < 0.012


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["4 bits of 128 in bfloat16", "4 bits of 64 with zeros", "8 bits of 128", "4 bits of 16"]),
       st.integers(1, 20), st.integers(1, 300), st.integers(1, 70))
def test_groups_in_another_order(name, tokens, depth, outputs):
    matrix, x = of(name, outputs, depth, is_ordered=True), numbers(tokens, depth)
    assert error(CpuKernels(2).linear(matrix)(x), matrix, x) < 5e-6


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
@PATHS
def test_a_product_does_not_depend_on_the_rows_beside_it(path, name):
    depth = depth_of(name, 300)
    x = numbers(41, depth)
    x[7] *= 1000
    product = kernels_of(path).linear(of(name, 100, depth))
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(41))


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(name, bad):
    depth = depth_of(name, 250)
    x = numbers(3, depth)
    x[1, depth - 1] = bad
    finite = CpuKernels(1).linear(of(name, 40, depth))(x).isfinite()
    assert finite[0].all() and finite[2].all() and not finite[1].any()


@pytest.mark.parametrize("name", ["Q8_0", "IQ4_NL", "Q6_K"])
@PATHS
def test_the_largest_sums_do_not_overflow(path, name):
    """All codes and all activations as large as they can be, of either sign."""
    depth = depth_of(name, 2048)
    matrix = of(name, 32, depth)
    rows = matrix.read(0, 32)
    for code in (0, (1 << matrix.format.bits) - 1):
        extreme = rows._replace(codes=torch.full_like(rows.codes, code))
        same = QuantizedMatrix(matrix.format, 32, depth, lambda first, end, rows=extreme: rows)
        for x in (torch.ones(7, depth), -torch.ones(7, depth)):
            product = kernels_of(path).linear(same)(x).double()
            assert distance(product, x.double() @ same.dequantized().double().T) < 3e-6


@pytest.mark.skipif(bool(paths.obstacle("vnni")), reason="wants a processor with AVX-512 VNNI")
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q3_K", "IQ4_NL", "MXFP4"])
def test_all_paths_add_the_same_integers(name):
    depth = depth_of(name, 300)
    matrix, x = of(name, 100, depth), numbers(9, depth)
    assert torch.equal(*(kernels_of(path).linear(matrix)(x) for path in ("vnni", "integer")))


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "IQ4_NL"])
def test_the_largest_products_do_not_overflow(name):
    """Inputs of one size, and codes that are all the highest or all the lowest."""
    depth = depth_of(name, 300)
    matrix, signs = of(name, 40, depth), torch.ones(7, depth)
    signs[1::2] = -1
    signs[2, ::2] = -1

    def read(first: int, end: int) -> Rows:
        rows = matrix.read(first, end)
        codes = torch.tensor([0, (1 << matrix.format.bits) - 1], dtype=torch.uint8)[torch.arange(first, end) % 2]
        return rows._replace(codes=codes[:, None].expand(rows.codes.shape).contiguous())

    largest = replace(matrix, read=read)
    assert error(CpuKernels(2).linear(largest)(signs), largest, signs) < 5e-6


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "4 bits of 64 with zeros"])
def test_tiles_add_the_same_integers(name):
    """Tiles of 32 rows, of the 17 and the 9 behind them, and the 8 that vectors multiply; gates, too, and a bias."""
    depth, launcher = depth_of(name, 300), KernelLauncher(2)
    matrix, x, bias = of(name, 40, depth), numbers(49, depth), numbers(40)
    for is_gated in (False, True):
        by_path = [blocks_linear([pack_blocks(matrix, bias, path, launcher, is_gated=is_gated)], launcher)
                   for path in ("integer", "software tiles")]
        for rows in (49, 41, 40, 3):
            assert torch.equal(*(product(x[:rows]) for product in by_path)), rows


def test_parts_of_several_formats_are_one_product():
    parts = [of("Q4_K", 70, 512), of("Q6_K", 33, 512), of("Q8_0", 40, 512)]
    whole, x, bias = stacked(parts), numbers(9, 512), numbers(143)
    assert isinstance(whole, StackedMatrix)
    kernels = CpuKernels(2)
    separate = torch.cat([kernels.linear(part)(x) for part in parts], dim=1)
    assert torch.equal(kernels.linear(whole)(x), separate)
    assert torch.equal(kernels.linear(whole, bias)(x), separate + bias)
    assert kernels.linear_bytes(whole) == sum(map(kernels.linear_bytes, parts))
    gates = stacked([of("Q4_K", 50, 512), of("Q6_K", 50, 512)])
    gate, up = kernels.linear(gates)(x).chunk(2, dim=1)
    assert distance(kernels.gated(gates)(x), F.silu(gate) * up) < 1e-5


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "4 bits of 128 in bfloat16"])
def test_inputs_on_one_side_of_zero_are_rounded_from_their_center(name):
    """Parts, gates, a bias and inputs in another order: the same products, with a smaller error."""
    depth = depth_of(name, 300)
    parts = [of(name, 70, depth, is_ordered=not FORMATS[name].groups_per_unit), of("Q8_0", 40, depth)]
    x, bias, kernels = numbers(60, depth), numbers(110), CpuKernels(2)
    x[:, ::37] += 30
    half = x.bfloat16()
    sums = x @ torch.cat([part.dequantized() for part in parts]).T
    products = [
        (kernels.linear(StackedMatrix(tuple(parts)), bias), x, sums + bias),
        (kernels.gated(parts[0]), x, F.silu(sums[:, :35]) * sums[:, 35:70]),
        (kernels.head(parts[0]), half, half.float() @ parts[0].dequantized().T)]
    before = [distance(product(given), exact) for product, given, exact in products]
    with kernels.packing.centering():
        for product, given, _ in products:
            product(given[:40])
    for (product, given, exact), was in zip(products, before, strict=True):
        assert distance(product(given), exact) < was / 3
        assert torch.equal(product(given[50:51])[0], product(given)[50])


def test_inputs_on_both_sides_of_zero_keep_their_rounding():
    kernels, x = CpuKernels(2), numbers(60, 300)
    x[:3] += 1e4  # exceptions
    product = kernels.linear(of("Q8_0", 40, 300))
    before = product(x)
    with kernels.packing.centering():
        product(x)
    assert torch.equal(product(x), before)


@TABLES
@settings(max_examples=4, deadline=None)
@given(st.integers(1, 100), st.integers(1, 600), st.booleans(), st.sampled_from([1.0, 5.5]))
def test_rows_of_a_table(name, outputs, least, is_ordered, scale):
    depth = depth_of(name, least)
    table = of(name, outputs, depth, is_ordered=is_ordered)
    ids = torch.randint(0, outputs, (9,))
    wanted = table.dequantized()[ids] * scale
    look_up = CpuKernels(2).embedding(table, torch.float32, scale)
    torch.testing.assert_close(look_up(ids), wanted, rtol=3e-6, atol=3e-6 * float(wanted.abs().max()))


def test_rows_of_a_table_are_rounded_once():
    table, ids = of("Q6_K", 90, 256), torch.arange(90)
    narrow, wide = (CpuKernels(2).embedding(table, kind)(ids) for kind in (torch.bfloat16, torch.float32))
    assert torch.equal(narrow, wide.bfloat16())


def test_ids_outside_a_table_are_clamped():
    look_up = CpuKernels(1).embedding(of("Q4_K", 50, 256), torch.float32)
    ids = torch.tensor([3, 50, 1 << 40, -1, -(1 << 62)])
    assert torch.equal(look_up(ids), look_up(torch.tensor([3, 49, 49, 0, 0])))


def test_a_head_and_the_embedding_of_one_matrix_share_memory():
    reads = 0
    matrix = of("Q6_K", 64, 256)

    def read(first: int, end: int):
        nonlocal reads
        reads += 1
        return matrix.read(first, end)

    table, kernels = QuantizedMatrix(matrix.format, 64, 256, read), CpuKernels(1)
    look_up, head, x = kernels.embedding(table, torch.float32), kernels.head(table), numbers(2, 256)
    assert reads == 1
    assert torch.equal(head(x), CpuKernels(1).head(matrix)(x))
    assert torch.equal(look_up(torch.arange(4)), CpuKernels(1).embedding(matrix, torch.float32)(torch.arange(4)))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_bytes_are_close_to_the_files(name):
    matrix = of(name, 128, 512)
    packed = CpuKernels(1).linear_bytes(matrix)
    in_file = 128 * BLOCK_TYPES[name].row_bytes(512)
    assert packed <= in_file * 1.06, packed / in_file


def test_products_and_lookups_are_captured():
    kernels = CpuKernels(2)
    table, matrix = of("Q6_K", 64, 512), stacked([of("Q4_K", 50, 512), of("Q6_K", 30, 512)])
    look_up, product = kernels.embedding(table, torch.float32), kernels.linear(matrix)
    ids = torch.tensor([3, 5, 60])
    graph = kernels.record(lambda: product(look_up(ids)))
    assert graph is not None
    for new in ([3, 5, 60], [9, 0, 1]):
        ids.copy_(torch.tensor(new))
        assert torch.equal(graph.run(), product(look_up(ids)))


@pytest.mark.parametrize(("kind", "why"), [
    (Format(8, 32, torch.float32, levels=tuple(map(float, range(256)))), "256 levels"),
    (Format(4, 24, torch.float32), "groups of 24"), (Format(4, 272, torch.float32), "groups of 272"),
    (Format(4, 32, torch.float32, has_minimums=True, zero=8), "a zero point together with minimums")])
def test_formats_without_kernels_are_refused_by_name(kind, why):
    kernels = CpuKernels(1)
    assert why in kernels.format_refusal(kind, torch.bfloat16)
    assert not ReferenceKernels().format_refusal(kind, torch.bfloat16)
    with pytest.raises(ValueError, match=why):
        kernels.linear(random_matrix(kind, 32, 272))


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_wrapped_kernels_and_the_reference(name):
    depth = depth_of(name, 64)
    matrix, x, ids = of(name, 64, depth), numbers(3, depth), torch.tensor([5, 63])
    exact, checked = ReferenceKernels(), CheckedKernels(CpuKernels(1))
    for product, wanted in ((checked.linear, exact.linear), (checked.gated, exact.gated), (checked.head, exact.head)):
        assert distance(product(matrix)(x), wanted(matrix)(x)) < 0.05
    rows, wanted = (kernels.embedding(matrix, torch.float32)(ids) for kernels in (checked, exact))
    torch.testing.assert_close(rows, wanted)
    with pytest.raises(ValueError, match="linear of"):
        checked.linear(matrix)(x[:, :-1])
    with pytest.raises(ValueError, match="token_ids"):
        checked.embedding(matrix, torch.float32)(ids.int())

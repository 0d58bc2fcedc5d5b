"""Products of bfloat16 as it is: of pairs, of AMX's tiles, and of tiles in software, which stand for AMX everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config
from support import product_paths
from support.paged import distance

from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import linear_bf16, tiles
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN

SOFTWARE = "software tiles"
each_path = pytest.mark.parametrize("path", [product_paths.param("bf16"), product_paths.param("amx"), SOFTWARE])
CLOSE = 1.1 * 2**-8  # of the largest result: rounding it to bfloat16, and a little for what is added in float32


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).bfloat16()


def exact(x, weight, bias=None):
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@each_path
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 90), st.integers(1, 300), st.integers(1, 200), st.booleans(), st.integers(1, 3))
def test_a_product(path, tokens, depth, outputs, with_bias, threads):
    weight, x = numbers(outputs, depth), numbers(tokens, depth)
    bias = numbers(outputs) if with_bias else None
    actual = linear_bf16.bf16_linear(weight, bias, KernelLauncher(threads), path=path)(x)
    assert distance(actual, exact(x, weight, bias)) < CLOSE


@each_path
@settings(max_examples=16, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 100), st.booleans(), st.integers(1, 3))
def test_a_gated_product(path, tokens, depth, size, with_bias, threads):
    weight, x = numbers(2 * size, depth) * 0.1, numbers(tokens, depth)
    bias = numbers(2 * size) if with_bias else None
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    actual = linear_bf16.bf16_linear(weight, bias, KernelLauncher(threads), GATED, path=path)(x)
    off = (actual.double() - torch.nn.functional.silu(gate) * up).abs()
    assert off.max() < CLOSE * gate.abs().max() * up.abs().max()


@each_path
def test_sums_add_nothing_to_the_error_of_rounding_the_result(path):
    weight, x = numbers(512, 1536), numbers(300, 1536)
    expected = exact(x, weight)
    error = lambda actual: (actual.double() - expected).square().mean().sqrt()
    actual = linear_bf16.bf16_linear(weight, None, KernelLauncher(2), path=path)(x)
    assert error(actual) < 1.01 * error(expected.bfloat16())


@each_path
@pytest.mark.parametrize(("depth", "is_gated"), [(576, False), (577, False), (96, True)])
def test_a_row_has_the_same_bits_alone_in_any_company_and_in_a_chunk_of_any_size(depth, is_gated, path):
    product = linear_bf16.bf16_linear(
        numbers(100, depth), numbers(100), KernelLauncher(2), GATED if is_gated else PLAIN, path=path)
    x = numbers(200, depth)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in range(1, 201):
        first = (37 * rows) % (201 - rows)
        assert torch.equal(product(x[first : first + rows]), alone[first : first + rows]), rows
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x[order]), alone[order])


@each_path
def test_a_row_alone_has_the_bits_of_company_with_numbers_too_small_for_a_normal_float32(path):
    weight, x = numbers(64, 100).float() * 2.0**-64, numbers(20, 100).float() * 2.0**-62
    product = linear_bf16.bf16_linear(weight.bfloat16(), None, KernelLauncher(1), path=path)
    together = product(x.bfloat16())
    assert torch.equal(torch.cat([product(row[None]) for row in x.bfloat16()]), together)
    assert (together == 0).any() or path == "bf16"


@each_path
@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_shows_in_its_own_row_and_nowhere_else(strange, path):
    weight, x = numbers(70, 64), numbers(5, 64)
    product = linear_bf16.bf16_linear(weight, None, KernelLauncher(1), path=path)
    before = product(x)
    x[2, 7] = strange
    after = product(x)
    assert not after[2].isfinite().any()
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@each_path
def test_zeros(path):
    zeros, some, launcher = torch.zeros(70, 64).bfloat16(), numbers(70, 64), KernelLauncher(1)
    assert not linear_bf16.bf16_linear(zeros, None, launcher, path=path)(some).any()
    assert not linear_bf16.bf16_linear(some, None, launcher, path=path)(zeros).any()


@product_paths.each(["amx"])
def test_amx_gives_the_bits_of_software(path):
    weight, x = numbers(100, 576), numbers(70, 576)
    by_hardware, by_software = (
        linear_bf16.bf16_linear(weight, None, KernelLauncher(2), path=each)(x) for each in (path, SOFTWARE))
    assert torch.equal(by_hardware, by_software)


def test_amx_that_multiplies_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(tiles, "obstacle", lambda feature: "" if feature == "amx-bf16" else "another feature")
    monkeypatch.setitem(linear_bf16.PRODUCT, "amx", linear_bf16.PRODUCT[SOFTWARE])
    assert linear_bf16.amx_obstacle.__wrapped__() == ""
    monkeypatch.setattr(linear_bf16, "bf16_linear", lambda *_, **__: lambda x: torch.zeros(len(x), 64).bfloat16())
    assert "wrong" in linear_bf16.amx_obstacle.__wrapped__()


def test_kernels_compiled_for_another_processor_multiply_none(monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f,-avx512bf16")
    assert not linear_bf16.has_bf16_gemm()

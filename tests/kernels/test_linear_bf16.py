"""Products of pairs of bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.paged import distance
from numba import config

from slotwise.kernels.cpu import linear_bf16
from slotwise.kernels.cpu.launcher import KernelLauncher

pytestmark = pytest.mark.skipif(not linear_bf16.has_bf16_gemm(), reason="wants a processor with AVX-512 BF16")

CLOSE = 1.1 * 2**-8  # of the largest result: rounding it to bfloat16, and a little for what is added in float32


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).bfloat16()


def exact(x, weight, bias=None):
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 300), st.integers(1, 200), st.booleans(), st.integers(1, 3))
def test_a_product(tokens, depth, outputs, with_bias, threads):
    weight, x = numbers(outputs, depth), numbers(tokens, depth)
    bias = numbers(outputs) if with_bias else None
    assert distance(linear_bf16.bf16_linear(weight, bias, KernelLauncher(threads))(x), exact(x, weight, bias)) < CLOSE


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 100), st.booleans(), st.integers(1, 3))
def test_a_gated_product(tokens, depth, size, with_bias, threads):
    weight, x = numbers(2 * size, depth) * 0.1, numbers(tokens, depth)
    bias = numbers(2 * size) if with_bias else None
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    actual = linear_bf16.bf16_linear(weight, bias, KernelLauncher(threads), is_gated=True)(x)
    off = (actual.double() - torch.nn.functional.silu(gate) * up).abs()
    assert off.max() < CLOSE * gate.abs().max() * up.abs().max()


def test_sums_add_nothing_to_the_error_of_rounding_the_result():
    weight, x = numbers(512, 1536), numbers(300, 1536)
    expected = exact(x, weight)
    error = lambda actual: (actual.double() - expected).square().mean().sqrt()
    assert error(linear_bf16.bf16_linear(weight, None, KernelLauncher(2))(x)) < 1.01 * error(expected.bfloat16())


@pytest.mark.parametrize(("depth", "is_gated"), [(576, False), (577, False), (96, True)])
def test_a_row_has_the_same_bits_alone_in_any_company_and_in_a_chunk_of_any_size(depth, is_gated):
    product = linear_bf16.bf16_linear(numbers(100, depth), numbers(100), KernelLauncher(2), is_gated=is_gated)
    x = numbers(200, depth)
    alone = torch.cat([product(row[None]) for row in x])
    for rows in range(1, 201):
        first = (37 * rows) % (201 - rows)
        assert torch.equal(product(x[first : first + rows]), alone[first : first + rows]), rows
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x[order]), alone[order])


@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_shows_in_its_own_row_and_nowhere_else(strange):
    weight, x = numbers(70, 64), numbers(5, 64)
    product = linear_bf16.bf16_linear(weight, None, KernelLauncher(1))
    before = product(x)
    x[2, 7] = strange
    after = product(x)
    assert not after[2].isfinite().any()
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_zeros():
    assert not linear_bf16.bf16_linear(torch.zeros(70, 64).bfloat16(), None, KernelLauncher(1))(numbers(3, 64)).any()
    assert not linear_bf16.bf16_linear(numbers(70, 64), None, KernelLauncher(1))(torch.zeros(3, 64).bfloat16()).any()


def test_kernels_compiled_for_another_processor_multiply_none(monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f,-avx512bf16")
    assert not linear_bf16.has_bf16_gemm()

"""Products of bfloat16 in half precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config
from support.paged import distance

from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import linear_fp16
from slotwise.compute.kernels.cpu.products.gemm import GATED

pytestmark = pytest.mark.skipif(not linear_fp16.has_fp16_gemm(), reason="wants a processor with AVX-512 FP16")

# Of the largest result: rounding it to bfloat16, and as much again for what is added in halves.
CLOSE = 2 * 2**-8


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size))).bfloat16()


def exact(x, weight, bias=None):
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 200), st.booleans(), st.integers(1, 3))
def test_a_product(tokens, chains, outputs, with_bias, threads):
    depth = chains * linear_fp16.CHAIN
    weight, x = numbers(outputs, depth), numbers(tokens, depth)
    bias = numbers(outputs) if with_bias else None
    assert distance(linear_fp16.fp16_linear(weight, bias, KernelLauncher(threads))(x), exact(x, weight, bias)) < CLOSE


@settings(max_examples=16, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 100), st.booleans(), st.integers(1, 3))
def test_a_gated_product(tokens, chains, size, with_bias, threads):
    depth = chains * linear_fp16.CHAIN
    weight, x = numbers(2 * size, depth) * 0.1, numbers(tokens, depth)
    bias = numbers(2 * size) if with_bias else None
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    actual = linear_fp16.fp16_linear(weight, bias, KernelLauncher(threads), GATED)(x)
    off = (actual.double() - torch.nn.functional.silu(gate) * up).abs()
    assert off.max() < CLOSE * gate.abs().max() * up.abs().max()


def test_what_halves_add_costs_less_than_rounding_the_result():
    weight, x = numbers(512, 1536), numbers(300, 1536)
    expected = exact(x, weight)
    error = lambda actual: (actual.double() - expected).square().mean().sqrt()
    assert error(linear_fp16.fp16_linear(weight, None, KernelLauncher(2))(x)) < 1.25 * error(expected.bfloat16())


def test_more_rows_than_are_halved_at_once():
    weight, x = numbers(96, 576), numbers(500, 576)
    assert distance(linear_fp16.fp16_linear(weight, None, KernelLauncher(2))(x), exact(x, weight)) < CLOSE


def test_a_product_does_not_depend_on_the_rows_beside_it():
    product, x = linear_fp16.fp16_linear(numbers(100, 192), None, KernelLauncher(2)), numbers(41, 192)
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(41))


@settings(max_examples=16, deadline=None)
@given(st.integers(-120, 118), st.integers(-120, 118))
def test_numbers_far_from_what_halves_hold(of_x, of_weight):
    x, weight = numbers(7, 64) * 2.0**of_x, numbers(70, 64) * 2.0**of_weight
    expected = exact(x, weight)
    actual = linear_fp16.fp16_linear(weight, None, KernelLauncher(1))(x)
    largest = expected.abs().max()
    if 1e-30 < largest < 1e38:
        assert distance(actual.double() / largest, expected / largest) < CLOSE
    else:
        assert not actual.isnan().any()


def test_tokens_and_outputs_of_different_sizes_stay_apart():
    x, weight = numbers(6, 64), numbers(6, 64)
    sizes = 2.0 ** torch.arange(-60, 60, 20).float()
    x, weight = (x * sizes[:, None]).bfloat16(), (weight * sizes.flip(0)[:, None]).bfloat16()
    actual, expected = linear_fp16.fp16_linear(weight, None, KernelLauncher(1))(x).double(), exact(x, weight)
    largest = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)  # that a result may have
    assert ((actual - expected).abs() <= largest * 2**-8).all()


@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_shows_in_its_own_row_and_nowhere_else(strange):
    weight, x = numbers(70, 64), numbers(5, 64)
    product = linear_fp16.fp16_linear(weight, None, KernelLauncher(1))
    before = product(x)
    x[2, 7] = strange
    after = product(x)
    assert not after[2].isfinite().any()
    assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_zeros():
    assert not linear_fp16.fp16_linear(torch.zeros(70, 64).bfloat16(), None, KernelLauncher(1))(numbers(3, 64)).any()
    assert not linear_fp16.fp16_linear(numbers(70, 64), None, KernelLauncher(1))(torch.zeros(3, 64).bfloat16()).any()


def test_only_whole_chains_of_bfloat16_fit():
    assert linear_fp16.fits(numbers(3, 64))
    assert not linear_fp16.fits(numbers(3, 65))
    assert not linear_fp16.fits(numbers(3, 64).float())


def test_kernels_compiled_for_another_processor_multiply_none(monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx512f,-avx512fp16")
    assert not linear_fp16.has_fp16_gemm()

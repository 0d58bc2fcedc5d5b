"""The CPU's products, norms and activation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import product_paths
from support.paged import distance

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.cpu.products.linear import tiled_linear
from slotwise.compute.kernels.cpu.products.onednn import onednn_linear
from slotwise.compute.kernels.interface import ACTIVATIONS, LayerNormWeights
from slotwise.compute.kernels.reference import ReferenceKernels

CPU, REFERENCE = CpuKernels(threads=2, path="float32"), ReferenceKernels()
FLOATS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# A result of one element may be off by bfloat16's whole rounding error, 2^-8, and still be rounded right.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01}
kinds = st.sampled_from([torch.float32, torch.bfloat16])


def numbers(kind: torch.dtype, *size: int) -> torch.Tensor:
    """Random numbers of a type."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(kind)


@settings(max_examples=20, deadline=None)
@given(kinds, st.integers(1, 90), st.integers(1, 300), st.integers(1, 150), st.booleans())
def test_linear(kind, tokens, depth, outputs, with_bias):
    weight, x = numbers(kind, outputs, depth), numbers(kind, tokens, depth)
    bias = numbers(kind, outputs) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert distance(tiled_linear(weight, bias, KernelLauncher(2))(x), expected) < CLOSE[kind]
    assert distance(CPU.linear(weight, bias)(x), expected) < CLOSE[kind]


@product_paths.each(paths.DENSE)
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 90), st.integers(1, 300), st.integers(1, 150), st.booleans())
def test_linear_on_each_path(path, tokens, depth, outputs, with_bias):
    kind = torch.bfloat16
    weight, x = numbers(kind, outputs, depth), numbers(kind, tokens, depth)
    bias = numbers(kind, outputs) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    actual = CpuKernels(2, path=path).linear(weight, bias)(x)
    assert distance(actual, expected) < 2 * CLOSE[kind]  # as much again for what is added in halves


@product_paths.each(paths.DENSE)
@settings(max_examples=12, deadline=None)
@given(kinds, st.integers(1, 60), st.integers(1, 6), st.integers(1, 90), st.booleans())
def test_gated(path, kind, tokens, depth, size, with_bias):
    weight, x = numbers(kind, 2 * size, 32 * depth) / 4, numbers(kind, tokens, 32 * depth)
    bias = numbers(kind, 2 * size) if with_bias else None
    gate, up = (x.double() @ weight.double().T + (bias.double() if with_bias else 0)).chunk(2, dim=1)
    off = (CpuKernels(2, path=path).gated(weight, bias)(x).double() - torch.nn.functional.silu(gate) * up).abs()
    assert off.max() < 3 * CLOSE[kind] * gate.abs().max() * up.abs().max()


@product_paths.each(paths.DENSE)
@FLOATS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_with_an_activation(path, kind, activation):
    """Of several tiles, and of a panel whose last outputs do not exist."""
    weight, bias, x = numbers(kind, 72, 96) / 8, numbers(kind, 72), numbers(kind, 33, 96)
    kernels = CpuKernels(2, path=path)
    expected = kernels.activate(kernels.linear(weight, bias)(x), activation)
    close = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[kind]
    torch.testing.assert_close(kernels.linear(weight, bias, activation)(x), expected, rtol=close, atol=close)


def test_linear_of_more_rows_than_are_widened_at_once():
    weight, x = numbers(torch.bfloat16, 96, 576), numbers(torch.bfloat16, 500, 576)
    assert distance(tiled_linear(weight, None, KernelLauncher(2))(x), x.double() @ weight.double().T) < 3e-3


@product_paths.each(["onednn"])
def test_onednn_products_carry_the_bias(path):
    weight, bias, x = (numbers(torch.bfloat16, *size) for size in ((64, 48), (64,), (5, 48)))
    expected = x.double() @ weight.double().T + bias.double()
    assert distance(onednn_linear(weight, bias)(x), expected) < 3e-3


@FLOATS
def test_a_product_does_not_depend_on_the_rows_beside_it(kind):
    weight, x = numbers(kind, 100, 200), numbers(kind, 41, 200)
    for product in (tiled_linear(weight, None, KernelLauncher(2)), CPU.linear(weight), CPU.gated(weight)):
        together = product(x)
        assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(41))


@settings(max_examples=16, deadline=None)
@given(kinds, st.integers(1, 70), st.integers(1, 400))
def test_norms_and_activation(kind, tokens, size):
    x, residual, weight = numbers(kind, tokens, size), numbers(kind, tokens, size), numbers(kind, size)
    ours, theirs = residual.clone(), residual.clone()
    close = {torch.float32: 1e-6, torch.bfloat16: 1.5e-3}[kind]
    assert distance(CPU.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < close
    actual = CPU.add_rms_norm(x, ours, weight, 1e-5)
    assert distance(actual, REFERENCE.add_rms_norm(x, theirs, weight, 1e-5)) < close
    assert torch.equal(ours, theirs)
    assert CPU.add(x, ours) is ours
    assert torch.equal(ours, REFERENCE.add(x, theirs))
    gate_up = numbers(kind, tokens, 2 * size) * 5
    assert distance(CPU.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)) < close
    assert distance(CPU.gelu_mul(gate_up), REFERENCE.gelu_mul(gate_up)) < close
    assert distance(CPU.soft_cap(x, 2.0), REFERENCE.soft_cap(x, 2.0)) < close
    offset = CPU.rms_norm(x, weight, 1e-5, 1.0)
    assert distance(offset, REFERENCE.rms_norm(x, weight, 1e-5, 1.0)) < close


@settings(max_examples=16, deadline=None)
@given(kinds, st.integers(1, 70), st.integers(1, 400), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_layer_norm(kind, tokens, size, has_weight, has_bias, offset):
    x, residual = numbers(kind, tokens, size) + 3, numbers(kind, tokens, size)
    norm = LayerNormWeights(numbers(kind, size) if has_weight else None, numbers(kind, size) if has_bias else None,
                            1e-5, offset)
    close = {torch.float32: 3e-6, torch.bfloat16: 2e-3}[kind]
    together = CPU.layer_norm(x, norm)
    assert (together.float() - REFERENCE.layer_norm(x, norm).float()).norm() <= close * (together.float().norm() + 1)
    assert all(torch.equal(CPU.layer_norm(x[i : i + 1], norm)[0], together[i]) for i in range(0, tokens, 9))
    ours, theirs = residual.clone(), residual.clone()
    sums, expected = CPU.layer_norm(x, norm, ours), REFERENCE.layer_norm(x, norm, theirs)
    assert torch.equal(ours, theirs)
    assert (sums.float() - expected.float()).norm() <= close * (expected.float().norm() + 1)


@FLOATS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_activations(kind, activation, is_gated):
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([0.0, 1e-8, -1e-8, 90.0, -90.0, 1e4, -1e4, 3.0])])
    x = torch.stack([x.view(-1, 2).T.flatten()] * 3).to(kind)  # gates and what they gate are alike
    expected = REFERENCE.activate(x, activation, is_gated=is_gated)
    # The reference itself cancels for negative numbers, and is multiplied by up to 12.
    relative, absolute = {torch.float32: 3e-6, torch.bfloat16: 2**-7}[kind], 1.5e-5 if is_gated else 1.5e-6
    torch.testing.assert_close(
        CPU.activate(x, activation, is_gated=is_gated), expected, rtol=relative, atol=absolute)


@FLOATS
def test_large_gates_saturate(kind):
    gate_up = torch.tensor([[1e4, -1e4, 90.0, -90.0, 1.0, 1.0, 1.0, 1.0]]).to(kind)
    torch.testing.assert_close(CPU.silu_mul(gate_up), torch.tensor([[1e4, 0.0, 90.0, 0.0]]).to(kind))


@FLOATS
def test_a_soft_cap_bounds_numbers_and_hides_no_other(kind):
    x = torch.tensor([[0.0, 1e-3, -3.0, 1e30, math.inf, -math.inf, math.nan]]).to(kind)
    torch.testing.assert_close(CPU.soft_cap(x, 2.0), REFERENCE.soft_cap(x, 2.0), equal_nan=True)


@pytest.mark.parametrize("cap", [0.5, 50.0, 1e6])
def test_a_soft_cap_is_as_exact_near_zero_as_elsewhere(cap):
    x = torch.cat([torch.logspace(-20, 7, 2000), -torch.logspace(-20, 7, 2000)])[None]
    expected = cap * torch.tanh(x.double() / cap)
    assert ((CPU.soft_cap(x, cap).double() - expected) / expected).abs().max() < 1e-6


def test_bfloat16_is_rounded_to_nearest_even():
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F80C000, 0x3F804000], dtype=torch.int32)
    values = bits.view(torch.float32)
    weight = torch.eye(len(values), dtype=torch.bfloat16)
    high = values.bfloat16()  # a product of exact parts whose sum needs rounding: value = high + low
    low = (values - high.float()).bfloat16()
    product = tiled_linear(torch.cat((weight, weight), dim=1), None, KernelLauncher(1))
    x = torch.cat((torch.diag(high), torch.diag(low)), dim=1)
    assert torch.equal(product(x).diagonal(), values.bfloat16())


def test_results_are_the_same_on_any_number_of_threads():
    weight, x = numbers(torch.float32, 640, 64), numbers(torch.float32, 30, 64)
    assert torch.equal(tiled_linear(weight, None, KernelLauncher(1))(x),
                       tiled_linear(weight, None, KernelLauncher(4))(x))

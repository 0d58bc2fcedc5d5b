"""Quantized products against plain torch doing the same arithmetic, and against what they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import product_paths
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import linear_int, paths, quantize, tiles
from slotwise.compute.kernels.cpu.products.gemm_int import ASKED, STEPS_OF_A_GROUP
from slotwise.compute.kernels.cpu.products.linear_int import int_linear
from slotwise.compute.kernels.cpu.products.quantize import (
    GROUP,
    LIMIT,
    RECORD,
    STEPS,
    pack,
    quantize_weight,
    weight_bytes,
)
from slotwise.engine.config import QUANTIZATIONS

BITS = pytest.mark.parametrize("bits", [8, 4])
SOFTWARE = "software tiles"
PATHS = pytest.mark.parametrize("path", [*map(product_paths.param, paths.QUANTIZED), SOFTWARE])
# Of the whole product, for normally distributed numbers.
CLOSE = {8: 0.025, 4: 0.13}
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 2**-8 * 1.01}


def test_the_engine_offers_what_the_kernels_have() -> None:
    assert ("none", *quantize.BITS) == QUANTIZATIONS


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def grouped(x: Tensor) -> Tensor:
    """`[rows, groups, 64]`, padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).float().unflatten(1, (-1, GROUP))


def reference(x: Tensor, weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same arithmetic in plain torch: whole numbers in groups, then their scales.

    And by how much each result may be off: a number half way between two steps, which in bfloat16 are many, goes either
    way where the last place of a factor is another.
    """
    steps, scales = quantize_weight(weight, bits)
    groups = grouped(x)
    largest = groups.abs().amax(2, keepdim=True)
    scaled = groups.double() * (LIMIT[bits] / largest.clamp_min(1e-30))
    undecided = ((scaled - scaled.floor() - 0.5).abs() < 1e-4).double()

    def product(activations: Tensor, steps: Tensor) -> Tensor:
        whole = torch.einsum("tgk,ogk->tog", activations, steps.double())
        return (whole * (largest / LIMIT[bits]).double().transpose(1, 2) * scales.double()).sum(2)

    return product(scaled.round(), steps), product(undecided, steps.abs())


@PATHS
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([8, 4]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 70),
       st.integers(1, 300), st.integers(1, 110), st.booleans())
def test_products(path, bits, kind, tokens, depth, outputs, with_bias):
    weight, x = numbers(outputs, depth).to(kind), numbers(tokens, depth).to(kind)
    bias = numbers(outputs).to(kind) if with_bias else None
    expected, undecided = reference(x, weight, bits)
    expected += bias.double() if with_bias else 0
    actual = int_linear(weight, bias, bits, path, KernelLauncher(2))(x).double()
    nearest = torch.clamp(actual, expected - undecided, expected + undecided)
    assert distance(actual, nearest) < ROUNDED[kind]


@PATHS
@settings(max_examples=40, deadline=None)
@given(st.sampled_from([8, 4]), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 40),
       st.integers(1, 200), st.integers(1, 70), st.booleans())
def test_gated_products(path, bits, kind, tokens, depth, size, with_bias):
    """What is gated is not rounded first, so the same product in float32 tells what to expect."""
    weight, x = numbers(2 * size, depth).to(kind), numbers(tokens, depth).to(kind)
    bias = numbers(2 * size).to(kind) if with_bias else None
    plain = int_linear(weight.float(), None if bias is None else bias.float(), bits, path, KernelLauncher(2))(x.float())
    gate, up = plain.double().chunk(2, dim=1)
    product = int_linear(weight, bias, bits, path, KernelLauncher(2), is_gated=True)
    assert distance(product(x), F.silu(gate) * up) < 5 * ROUNDED[kind]


@BITS
@PATHS
def test_a_product_is_close_to_what_it_stands_for(path, bits):
    weight, x = numbers(96, 576), numbers(50, 576)
    assert distance(int_linear(weight, None, bits, path, KernelLauncher(2))(x), x @ weight.T) < CLOSE[bits]


@BITS
@PATHS
def test_the_largest_sums_do_not_overflow(path, bits):
    weight, x = torch.ones(32, 640), torch.ones(7, 640)
    for signs in (1, -1):
        product = int_linear(weight * signs, None, bits, path, KernelLauncher(1))(x)
        torch.testing.assert_close(product, torch.full((7, 32), 640.0 * signs), rtol=1e-5, atol=0)
        assert torch.equal(int_linear(weight * -signs, None, bits, path, KernelLauncher(1))(-x), product)


@BITS
@PATHS
def test_a_product_does_not_depend_on_the_rows_beside_it(path, bits):
    x = numbers(41, 200)
    x[7] *= 1000
    product = int_linear(numbers(100, 200), None, bits, path, KernelLauncher(2))
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(41))


@BITS
@PATHS
def test_an_outlier_spoils_its_own_group_alone(path, bits):
    weight, x = numbers(32, 256), numbers(1, 256)
    spoilt = x.clone()
    spoilt[0, 0] = 1e4
    rest = x[:, GROUP:] @ weight[:, GROUP:].T
    weight[:, :GROUP] = 0
    product = int_linear(weight, None, bits, path, KernelLauncher(1))
    assert distance(product(spoilt), rest) < 2 * CLOSE[bits]


@BITS
@PATHS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(path, bits, bad):
    x = numbers(3, 130)
    x[1, 129] = bad
    finite = int_linear(numbers(40, 130), None, bits, path, KernelLauncher(1))(x).isfinite()
    assert finite[0].all() and finite[2].all() and not finite[1].any()


@BITS
@PATHS
def test_zeros_stay_zeros(path, bits):
    assert not int_linear(torch.zeros(33, 70), None, bits, path, KernelLauncher(1))(numbers(2, 70)).any()
    assert not int_linear(numbers(33, 70), None, bits, path, KernelLauncher(1))(torch.zeros(2, 70)).any()


@BITS
def test_weights_take_what_is_told_and_keep_within_their_steps(bits):
    weight = numbers(100, 200)
    steps, scales = quantize_weight(weight, bits)
    assert int(steps.abs().max()) <= STEPS[bits] + (bits == 4) and pack(steps, scales, bits).nbytes == weight_bytes(
        100, 200, bits)
    assert RECORD[bits] * 8 / (32 * GROUP) <= bits + 1  # bits a weight, its part of a scale included


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_kernels_quantize_what_they_are_asked_to(quantization):
    weight, x = numbers(64, 128), numbers(3, 128)
    kernels, exact = CpuKernels(2, quantization), CpuKernels(2)
    assert not torch.equal(kernels.linear(weight)(x), exact.linear(weight)(x))
    assert kernels.linear_bytes(weight) < exact.linear_bytes(weight)
    with pytest.raises(ValueError, match="quantization must be"):
        CpuKernels(2, "int3")


@BITS
def test_every_line_of_a_panel_is_prefetched(bits):
    step = RECORD[bits] // STEPS_OF_A_GROUP
    for share in (step, step // 2, step // 3):  # of one tile, of each of two, of three
        places = [at * share + share * line // ASKED[bits] for at in range(100) for line in range(ASKED[bits])]
        assert {place // 64 for place in places} >= set(range(places[-1] // 64))



@BITS
@PATHS
@settings(max_examples=30, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 70), st.integers(1, 300), st.integers(1, 50),
       st.booleans())
def test_every_path_gives_the_same_bits(path, bits, kind, tokens, depth, outputs, is_gated):
    weight, bias, x = numbers(2 * outputs, depth).to(kind), numbers(2 * outputs), numbers(tokens, depth).to(kind)
    results = [int_linear(weight, bias, bits, each, KernelLauncher(2), is_gated=is_gated)(x)
               for each in ("integer", path)]
    assert torch.equal(*results)


def test_amx_that_multiplies_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(tiles, "obstacle", lambda feature: "" if feature == "amx-int8" else "another feature")
    software = linear_int.PRODUCT[8, torch.bfloat16, SOFTWARE]
    monkeypatch.setitem(linear_int.PRODUCT, (8, torch.bfloat16, "amx_int8"), software)
    assert linear_int.amx_obstacle.__wrapped__() == ""
    monkeypatch.setattr(linear_int, "int_linear", lambda *_: lambda x: torch.zeros(len(x), 64).bfloat16())
    assert "wrong" in linear_int.amx_obstacle.__wrapped__()

"""Tensors in the formats of `--quantization`; `test_linear_blocks.py` multiplies such matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import product_paths
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import linear_blocks, paths, tiles
from slotwise.compute.kernels.cpu.products.quantize import FORMATS, MOMENTS, InputMoments, quantized
from slotwise.engine.config import QUANTIZATIONS

NAMES = pytest.mark.parametrize("name", FORMATS)
CLOSE = {"int8": 0.006, "int4": 0.08}  # of normally distributed numbers
BITS = {"int8": 8.5, "int4": 5.0}  # of a weight, its part of a scale included


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def test_the_engine_offers_what_the_kernels_have() -> None:
    assert ("none", *FORMATS) == QUANTIZATIONS


@NAMES
@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(-6, 10), st.sampled_from([torch.float32, torch.bfloat16]))
@example(33, 73, 0, torch.float32)
def test_weights_stay_close(name: str, outputs: int, depth: int, power: int, kind: torch.dtype) -> None:
    weight = (numbers(outputs, depth) * 2.0**power).to(kind)
    matrix = quantized(weight, FORMATS[name])
    found = matrix.dequantized()
    assert found.shape == weight.shape
    assert distance(found, weight.float()) < 1.5 * CLOSE[name]
    assert torch.equal(found[outputs // 2 :], matrix.dequantized(outputs // 2)), "in parts, too"


@NAMES
def test_how_close_and_how_large(name: str) -> None:
    weight = numbers(96, 1024)
    assert distance(quantized(weight, FORMATS[name]).dequantized(), weight) < CLOSE[name]
    assert CpuKernels(1, name).linear_bytes(weight) * 8 / weight.numel() == BITS[name]


@NAMES
def test_what_lies_on_the_grid_stays_there(name: str) -> None:
    """As in a checkpoint that was dequantized: rounded again it is the same."""
    once = quantized(numbers(64, 256), FORMATS[name]).dequantized()
    assert distance(quantized(once, FORMATS[name]).dequantized(), once) < CLOSE[name] / 20


def test_a_range_is_better_than_the_least_and_the_largest_weight_at_its_ends() -> None:
    weight = numbers(64, 1024)
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    found = quantized(weight, FORMATS["int4"]).dequantized()
    assert distance(found, weight) < 0.95 * distance(plain.flatten(1), weight)


def correlated(tokens: int, depth: int) -> Tensor:
    """Inputs that move together, the first of each hundred ten times as large as the others."""
    found = numbers(tokens, 12) @ numbers(12, depth) + 0.3 * numbers(tokens, depth)
    found[:, ::100] *= 10
    return found


def moments_of(x: Tensor) -> Tensor:
    recorded = InputMoments()
    watched = recorded.watched(lambda given: given, x.shape[1])
    for rows in (x[:100], x[100:]):
        assert watched(rows) is rows
    (found,) = recorded.found
    return found


@pytest.mark.parametrize("depth", [300, MOMENTS, 24])
def test_moments_of_the_inputs_make_errors_of_the_outputs_smaller(depth: int) -> None:
    """For other inputs of the same kind; the outputs in parts are those of the whole."""
    x, weight, format = correlated(1000, depth), numbers(64, depth), FORMATS["int4"]
    moments = moments_of(x[:500])
    run = torch.nn.functional.pad(x[:500], (0, -depth % MOMENTS))[:, -MOMENTS:]
    torch.testing.assert_close(moments[-1], run.T @ run, rtol=1e-4, atol=1e-2)
    matrix = quantized(weight, format, moments)
    found, plain = matrix.dequantized(), quantized(weight, format).dequantized()
    exact = x[500:] @ weight.T
    assert distance(x[500:] @ found.T, exact) < 0.6 * distance(x[500:] @ plain.T, exact)
    assert torch.equal(found[32:], matrix.dequantized(32))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
def test_moments_that_say_nothing_change_little(value: float) -> None:
    weight = numbers(64, 2 * MOMENTS)
    found = quantized(weight, FORMATS["int4"], torch.full((2, MOMENTS, MOMENTS), value)).dequantized()
    assert distance(found, weight) < 2 * CLOSE["int4"]


def test_a_model_is_packed_for_the_inputs_that_were_recorded() -> None:
    """In the order of its products; another model is refused."""
    depth = MOMENTS + 32
    kernels, x, weight = CpuKernels(2, "int4"), correlated(500, depth), numbers(64, depth)
    with kernels.packing.recording() as moments:
        kernels.linear(weight)(x)
        kernels.gated(weight)(x * 2)
        size = kernels.linear_bytes(weight)
    assert [one.shape for one in moments] == [(2, MOMENTS, MOMENTS)] * 2 and size > kernels.linear_bytes(weight)
    torch.testing.assert_close(moments[1], 4 * moments[0])
    with kernels.packing.compensating(moments):
        packed = kernels.linear(weight)(x)
        kernels.gated(weight)
        with pytest.raises(ValueError, match=f"of {depth} inputs were not recorded"):
            kernels.linear(weight)
    with kernels.packing.compensating(moments), pytest.raises(ValueError, match="of 96 inputs were not recorded"):
        kernels.linear(numbers(64, 96))
    exact = x @ weight.T
    assert distance(packed, exact) < 0.7 * distance(kernels.linear(weight)(x), exact)


@NAMES
@pytest.mark.parametrize("weight", [0.0, 1e-9, -1e-9, 3e38])
def test_the_smallest_and_the_largest_weights(name: str, weight: float) -> None:
    found = quantized(torch.full((2, 70), weight), FORMATS[name]).dequantized()
    assert found.isfinite().all()
    if abs(weight) < 1:
        assert (found - weight).abs().max() < 2e-6


@NAMES
def test_kernels_quantize_what_they_are_asked_to(name: str) -> None:
    weight, x = numbers(64, 128), numbers(3, 128)
    kernels, exact = CpuKernels(2, name), CpuKernels(2)
    product = kernels.linear(weight)(x)
    assert 0 < distance(product, exact.linear(weight)(x)) < 2 * CLOSE[name]
    assert torch.equal(product, kernels.linear(quantized(weight, FORMATS[name]))(x))
    assert torch.equal(kernels.head(weight)(x), CpuKernels(2, "int8").linear(weight)(x)), "each error is a token's"
    assert torch.equal(kernels.exact_linear(weight)(x), exact.linear(weight)(x))
    with pytest.raises(ValueError, match="quantization must be"):
        CpuKernels(2, "int3")


@product_paths.each(paths.QUANTIZED)
def test_every_path_gives_the_same_bits(path: str) -> None:
    weight, bias, x = numbers(100, 200).bfloat16(), numbers(100), numbers(33, 200).bfloat16()
    for name in FORMATS:
        results = [CpuKernels(2, name, path=each).gated(weight, bias)(x) for each in ("integer", path)]
        assert torch.equal(*results)


def test_amx_that_multiplies_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "obstacle", lambda feature: "" if feature == "amx-int8" else "another feature")
    monkeypatch.setitem(linear_blocks.PATHS, "amx_int8", linear_blocks.PATHS["software tiles"])
    obstacle = linear_blocks.amx_obstacle.__wrapped__
    assert obstacle() == ""
    monkeypatch.setattr(linear_blocks, "blocks_linear", lambda *_: lambda x: torch.zeros(len(x), 64).bfloat16())
    assert "wrong" in obstacle()

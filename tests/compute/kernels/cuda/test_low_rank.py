"""What adapters add to products, against the contract in plain torch."""

from __future__ import annotations

import pytest
import torch
from support.cuda_device import DEVICE, KERNELS
from support.cuda_ragged import REFERENCE
from support.paged import distance

from slotwise.compute.kernels.interface import NO_ADAPTER, LowRank, LowRankPart

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3 if DEVICE == "cuda" else 2e-2}
INPUTS, PARTS, PLACES = 72, [(0, 40, 8), (40, 30, 3), (70, 30, 0)], 4  # of a part: first output, outputs, rank
OUTPUTS = 100


def numbers(seed: int, *size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(kind)


def products(kind: torch.dtype):
    """The adapters and the product of both kernels; the first place has no bias, the last one no adapter."""
    made = []
    for kernels in (KERNELS, REFERENCE):
        adapters = kernels.adapters(PLACES, 16, kind)
        product = adapters.product(OUTPUTS, INPUTS, len(PARTS))
        for place in range(PLACES - 1):
            bias = torch.cat([numbers(place, 70), torch.zeros(30)]) if place else None
            parts = tuple(
                LowRankPart(first, (numbers(place, rank, INPUTS, kind=kind) / 10).to(kernels.device),
                            (numbers(place + 9, count, rank, kind=kind) / 10).to(kernels.device))
                for first, count, rank in PARTS)
            product.set(place, product.pack(LowRank(parts, None if bias is None else bias.to(kernels.device))))
        made.append((adapters, product))
    return made


@pytest.mark.parametrize("rows", [1, 7, 150, 600])
@pytest.mark.parametrize("kind", CLOSE, ids=str)
def test_the_sum_is_that_of_the_reference(kind, rows):
    """Rows of all adapters, of none, and of a place without one; with few rows and more than graphs have."""
    (gpu, own), (reference, exact) = products(kind)
    places = [[0, NO_ADAPTER, 2, 1, 3][row * 7 % 5] for row in range(rows)]
    x, out = numbers(1, rows, INPUTS, kind=kind), numbers(2, rows, OUTPUTS, kind=kind)
    for adapters in (gpu, reference):
        adapters.assign(places)
        assert adapters.are_any
    assert distance(own.add(x.to(DEVICE), out.clone().to(DEVICE)).cpu(), exact.add(x, out.clone())) < CLOSE[kind]
    kept = torch.arange(0, rows, 3)
    gpu.select(kept.to(DEVICE))
    reference.select(kept)
    x, out = x[kept], out[kept]
    assert distance(own.add(x.to(DEVICE), out.clone().to(DEVICE)).cpu(), exact.add(x, out.clone())) < CLOSE[kind]


def test_rows_without_an_adapter_stay_as_they_are():
    (gpu, own), _ = products(torch.float32)
    x, out = numbers(1, 40, INPUTS).to(DEVICE), numbers(2, 40, OUTPUTS).to(DEVICE)
    before = out.clone()
    gpu.assign([NO_ADAPTER] * 40)
    assert not gpu.are_any
    gpu.assign([1, *[NO_ADAPTER] * 30])  # and padding behind
    own.add(x, out)
    assert torch.equal(out[1:], before[1:]) and not torch.equal(out[0], before[0])


def test_the_adapters_of_few_rows_lie_at_one_address():
    """Which graphs hold."""
    (gpu, _), _ = products(torch.float32)
    gpu.assign([0, 1, NO_ADAPTER])
    address = gpu.places.data_ptr()
    gpu.assign([NO_ADAPTER, 2, 2, 1])
    assert gpu.places.data_ptr() == address


def test_what_is_forgotten_adds_nothing():
    (gpu, own), _ = products(torch.float32)
    x, out = numbers(1, 3, INPUTS).to(DEVICE), numbers(2, 3, OUTPUTS).to(DEVICE)
    own.set(1, None)
    gpu.assign([1, 1, 1])
    assert torch.equal(own.add(x, out.clone()), out)
    assert own.add(x[:0], out[:0]).shape == (0, OUTPUTS)

"""What adapters add to products on the CPU, against the contract in plain torch."""

from __future__ import annotations

import pytest
import torch
from support.paged import distance
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.interface import NO_ADAPTER, LowRank, LowRankPart
from slotwise.compute.kernels.reference import ReferenceKernels

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
SHAPES = {  # inputs, and of each part: first output, outputs, rank
    "parts of some ranks": (96, [(0, 40, 8), (40, 30, 3), (70, 30, 0)]),
    "more outputs than are summed at once": (200, [(0, 600, 16)]),
    "ranks in several strips": (130, [(0, 50, 40), (50, 70, 100), (120, 33, 64)]),
    "outputs without a part": (64, [(32, 32, 4)])}
PLACES = 4


def numbers(seed: int, *size: int, kind: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(kind)


def products(shape: str, kind: torch.dtype):
    """The adapters and the product of both kernels; the first place has no bias, the last one no adapter."""
    inputs, parts = SHAPES[shape]
    outputs = max(first + count for first, count, _ in parts)
    made = []
    for kernels in (CpuKernels(threads=2), ReferenceKernels()):
        adapters = kernels.adapters(PLACES, 100, kind)
        product = adapters.product(outputs, inputs, len(parts))
        for place in range(PLACES - 1):
            bias = torch.zeros(outputs)
            for first, count, _ in parts:
                bias[first : first + count] = numbers(place, count)
            product.set(place, product.pack(LowRank(tuple(
                LowRankPart(first, numbers(place, rank, inputs, kind=kind) / 10,
                            numbers(place + 9, count, rank, kind=kind) / 10)
                for first, count, rank in parts), bias if place else None)))
        made.append((adapters, product))
    return made, inputs, outputs


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CLOSE)
def test_the_sum_is_that_of_the_reference(kind, shape, rows):
    ((cpu, own), (reference, exact)), inputs, outputs = products(shape, kind)
    places = [[0, NO_ADAPTER, 2, 1, 3][row * 7 % 5] for row in range(rows)]
    x, out = numbers(1, rows, inputs, kind=kind), numbers(2, rows, outputs, kind=kind)
    for adapters in (cpu, reference):
        adapters.assign(places)
        assert adapters.are_any
    assert distance(own.add(x, out.clone()), exact.add(x, out.clone())) < CLOSE[kind]
    kept = torch.arange(0, rows, 3)
    for adapters in (cpu, reference):
        adapters.select(kept)
    assert distance(own.add(x[kept], out[kept]), exact.add(x[kept], out[kept])) < CLOSE[kind]


@pytest.mark.parametrize("kind", CLOSE)
def test_a_row_does_not_depend_on_its_company(kind):
    ((cpu, own), _), inputs, outputs = products("ranks in several strips", kind)
    x, out = numbers(1, 40, inputs, kind=kind), numbers(2, 40, outputs, kind=kind)
    cpu.assign([row % 3 for row in range(40)])
    together = own.add(x, out.clone())
    for row in range(40):
        cpu.assign([row % 3])
        assert torch.equal(own.add(x[row : row + 1], out[row : row + 1].clone())[0], together[row])


def test_rows_without_an_adapter_and_forgotten_adapters_add_nothing():
    ((cpu, own), _), inputs, outputs = products("parts of some ranks", torch.float32)
    x, out = numbers(1, 3, inputs), numbers(2, 3, outputs)
    cpu.assign([NO_ADAPTER] * 3)
    assert not cpu.are_any
    cpu.assign([0, NO_ADAPTER, 3])
    changed = own.add(x, out.clone())
    assert not torch.equal(changed[0], out[0]) and torch.equal(changed[1:], out[1:])
    own.set(0, None)
    assert torch.equal(own.add(x, out.clone()), out)


def test_a_graph_serves_other_rows_and_other_adapters():
    kernels = CpuKernels(threads=2)
    adapters = kernels.adapters(2, 8, torch.float32)
    product = adapters.product(48, 32, 1)
    x, out = numbers(1, 6, 32), torch.zeros(6, 48)
    factors = [LowRank((LowRankPart(0, numbers(i, 8, 32), numbers(i, 48, 8)),)) for i in range(3)]
    product.set(0, product.pack(factors[0]))
    adapters.assign([0] * 6)
    graph = kernels.record(lambda: product.add(x, out))
    assert graph is not None
    for place, each, rows in ((1, factors[1], [1, 0, NO_ADAPTER, 1, 0, 1]), (0, factors[2], [0, 0, 1, 0, 0, 0])):
        product.set(place, product.pack(each))
        adapters.assign(rows)
        expected = product.add(x, torch.zeros(6, 48))
        out.zero_()
        assert torch.equal(graph.run(), expected)

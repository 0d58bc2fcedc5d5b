"""A token's result does not depend on the tokens beside it, bit for bit: products of every path, and the operations."""

from __future__ import annotations

import pytest
import torch
from support import product_paths
from torch import Tensor

from slotwise.compute.kernels.cpu.kernels import CpuKernels
from slotwise.compute.kernels.cpu.products import paths
from slotwise.compute.kernels.interface import Linear
from slotwise.compute.kernels.reference import ReferenceKernels

ROWS = [1, 2, 3, 5, 8, 9, 12, 13, 16, 17, 31, 32, 33, 48, 64, 65, 130]
MANY = 300
FLOATS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
INVARIANT = [path for path in paths.DENSE if path != "onednn"]


def random(*size: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(kind)


def check(operation: Linear, x: Tensor) -> None:
    """Each row of `x`, among so many before and behind it, gives what it gives among all."""
    whole = operation(x).clone()
    for rows in ROWS:
        for start in (0, 7, MANY - rows):
            assert torch.equal(operation(x[start : start + rows]), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize(("kind", "path"), [
    product_paths.param("float32", "float32"), *(product_paths.param(path, "bfloat16") for path in INVARIANT)])
@pytest.mark.parametrize(("outputs", "depth"), [(96, 64), (1000, 96), (192, 576)])
def test_products(outputs: int, depth: int, kind: str, path: str) -> None:
    dtype = getattr(torch, kind)
    kernels = CpuKernels(threads=2, path=path)
    weight, bias, x = (random(*size, kind=dtype) for size in ((outputs, depth), (outputs,), (MANY, depth)))
    assert not kernels.batch_dependence(dtype)
    check(kernels.linear(weight), x)
    check(kernels.linear(weight, bias), x)
    check(kernels.head(weight), x)
    check(kernels.gated(weight), x)


@product_paths.each(paths.QUANTIZED)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_products_of_quantized_weights(quantization: str, path: str) -> None:
    kernels = CpuKernels(threads=2, path=path, quantization=quantization)
    weight, x = random(192, 576), random(MANY, 576)
    assert not kernels.batch_dependence(torch.bfloat16)
    check(kernels.linear(weight), x)
    check(kernels.head(weight), x)
    check(kernels.gated(weight), x)


@FLOATS
@pytest.mark.parametrize("size", [96, 100, 576])
def test_operations_on_each_token(size: int, kind: torch.dtype) -> None:
    kernels = CpuKernels(threads=2)
    weight, x, gates = random(size, kind=kind), random(MANY, size, kind=kind), random(MANY, 2 * size, kind=kind)
    residual = random(MANY, size, kind=kind)
    places = {each.data_ptr(): index for index, each in enumerate(x)}

    def added(some: Tensor) -> Tensor:
        start = places[some.data_ptr()]
        mine = residual[start : start + len(some)].clone()
        return torch.cat((kernels.add_rms_norm(some, mine, weight, 1e-5), mine), dim=1)

    check(lambda some: kernels.rms_norm(some, weight, 1e-5), x)
    check(added, x)
    check(kernels.silu_mul, gates)
    check(kernels.gelu_mul, gates)
    check(lambda some: kernels.soft_cap(some, 2.0), x)


@product_paths.each(["onednn"])
def test_what_depends_on_the_batch_is_named(path: str) -> None:
    assert "oneDNN" in CpuKernels(path=path).batch_dependence(torch.bfloat16)
    assert not CpuKernels(path=path).batch_dependence(torch.float32)


def test_other_devices_depend_on_the_batch() -> None:
    assert "device reference" in ReferenceKernels().batch_dependence(torch.float32)


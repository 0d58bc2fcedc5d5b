"""Products with 8-bit floats: those of the dequantized weight in bfloat16, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slotwise.compute.kernels.cpu.launcher import KernelLauncher
from slotwise.compute.kernels.cpu.products import linear_bf16, linear_fp8
from slotwise.compute.kernels.cpu.products.gemm import GATED, PLAIN, WIDE
from slotwise.compute.kernels.matrix import E4M3, Factors, Format, QuantizedMatrix, Rows

needs_bf16 = pytest.mark.skipif(not linear_bf16.has_bf16_gemm(), reason="no AVX-512 BF16")


def fp8(outputs: int, depth: int, group: int) -> QuantizedMatrix:
    """All numbers of E4M3 among its weights, and scales of very different sizes."""
    torch.manual_seed(outputs)
    codes = (torch.randn(outputs, depth) * 60).to(torch.float8_e4m3fn).view(torch.uint8)
    every = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    codes.view(-1)[: len(every)] = every[: codes.numel()]
    scales = torch.rand(outputs, -(-depth // group) if group else 1) * 10.0 ** torch.randint(-6, 3, (outputs, 1))
    return QuantizedMatrix(Format(8, group, torch.float32, levels=E4M3), outputs, depth,
                           lambda first, end: Rows(codes[first:end], Factors(scales[first:end])))


def both(matrix: QuantizedMatrix, bias: Tensor | None, form: int, path: str = "bf16") -> tuple:
    launcher = KernelLauncher(2)
    return (linear_fp8.fp8_linear(matrix, bias, launcher, form, path=path),
            linear_bf16.bf16_linear(matrix.dequantized().bfloat16(), bias, launcher, form, path=path))


@needs_bf16
@pytest.mark.parametrize(("outputs", "depth", "group"), [
    (64, 128, 128), (100, 256, 128), (96, 200, 128), (256, 512, 0), (40, 130, 0), (2, 16, 0)])
@pytest.mark.parametrize("form", [PLAIN, GATED, WIDE])
def test_products_are_those_of_bfloat16(outputs: int, depth: int, group: int, form: int) -> None:
    for bias in (None, torch.randn(outputs).bfloat16()):
        found, expected = both(fp8(outputs, depth, group), bias, form)
        for tokens in (1, 5, 14, 15, 40, 300):
            x = torch.randn(tokens, depth).bfloat16()
            assert torch.equal(found(x), expected(x))


@needs_bf16
def test_bytes_are_those_of_the_panels() -> None:
    for outputs, depth in ((64, 128), (100, 256), (33, 200)):
        assert linear_fp8.pack(fp8(outputs, depth, 128)).nbytes == linear_fp8.packed_bytes(outputs, depth)
    assert linear_fp8.packed_bytes(4096, 4096) < 1.04 * 4096 * 4096


def test_groups_of_another_size_are_refused() -> None:
    refused = [group for group in (0, 16, 32, 64, 128) if linear_fp8.refusal(fp8(4, 256, group).format)]
    assert refused == [16, 32, 64]

"""Tiles, of software and of this processor, against the manual's semantics in NumPy; kernels for one with AMX."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import cfunc

from slotwise.compute.kernels.cpu.jit.compiler import INT, intrinsic
from slotwise.compute.kernels.cpu.memory import aligned
from slotwise.compute.kernels.cpu.products import tiles

SUMS, LEFT, RIGHT = 0, 4, 6


def _instruction(name, kind=tiles.SoftwareTiles):
    def emit(builder, left, right, sums, memory):
        used = kind(builder, memory)
        used.begin()
        used.load(LEFT, left, 64)
        used.load(RIGHT, right, 64)
        used.load(SUMS, sums, 64)
        getattr(used, name)(SUMS, LEFT, RIGHT)
        used.zero(LEFT)
        used.store(SUMS, sums, 64)
        used.store(LEFT, left, 64)
        used.end()

    operation = intrinsic(emit, *[INT] * 4)
    return cfunc("void(int64, int64, int64, int64)", nopython=True)(
        lambda left, right, sums, memory: operation(left, right, sums, memory)).ctypes


@pytest.fixture(params=[tiles.SoftwareTiles, tiles.HardwareTiles], ids=["software", "hardware"])
def instruction(request):
    """Compiles an instruction of software, or of this processor."""
    def compiled(name, feature):
        if request.param is tiles.HardwareTiles and (why := tiles.obstacle(feature)):
            pytest.skip(why)
        return _instruction(name, request.param)

    return compiled


def computed(instruction, left, right, sums):
    """The sums of an instruction; `left` is zero afterwards."""
    memory, place = aligned(tiles.MEMORY_BYTES, np.uint8)
    left, sums = left.copy(), sums.copy()
    instruction(left.ctypes.data, right.ctypes.data, sums.ctypes.data, place)
    assert not left.any()
    assert len(memory) == tiles.MEMORY_BYTES
    return sums


def flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def widened(bits):
    return flushed((bits.astype(np.uint32) << 16).view(np.float32))


def by_the_manual(left, right, sums):
    """TDPBF16PS: a product of two bfloat16 is exact in float32, so that adding it rounds once, as an FMA does."""
    x, y = widened(left), widened(right)  # [16 rows, 32], [16 pairs, 16 columns, 2]
    parts = np.zeros((2, 16, 16), np.float32)
    for pair in range(16):
        for odd in (0, 1):
            parts[odd] = flushed(parts[odd] + x[:, 2 * pair + odd, None] * y[None, pair, :, odd])
    return flushed(flushed(sums) + flushed(parts[0] + parts[1]))


def bfloat16(generator, *size, scale=1.0):
    return ((generator.standard_normal(size, np.float32) * np.float32(scale)).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e18], ids=["ordinary", "small", "large"])
def test_a_bfloat16_product_has_the_bits_of_the_manual(instruction, scale):
    generator = np.random.default_rng(1)
    left, right = bfloat16(generator, 16, 32, scale=scale), bfloat16(generator, 16, 16, 2)
    sums = generator.standard_normal((16, 16), np.float32)
    add = instruction("add_bf16", "amx-bf16")
    assert np.array_equal(computed(add, left, right, sums).view(np.uint32),
                          by_the_manual(left, right, sums).view(np.uint32))


def test_numbers_below_the_smallest_normal_one_are_zero(instruction):
    add = instruction("add_bf16", "amx-bf16")
    left, right = np.full((16, 32), 0x0001, np.uint16), np.full((16, 16, 2), 0x7F00, np.uint16)  # tiny * 2**127
    sums = np.full((16, 16), 1e-40, np.float32)
    assert np.array_equal(computed(add, left, right, sums), np.zeros((16, 16)))
    left[:] = right[:] = 0x1F80  # 2**-64: products are 2**-128, below the smallest normal number
    assert np.array_equal(computed(add, left, right, np.ones((16, 16), np.float32)), np.ones((16, 16)))


def test_an_integer_product_is_exact(instruction):
    generator = np.random.default_rng(2)
    left, right = generator.integers(-128, 128, (16, 64), np.int8), generator.integers(0, 256, (16, 16, 4), np.uint8)
    sums = generator.integers(-1000, 1000, (16, 16), np.int32)
    expected = sums + left.astype(np.int32) @ right.astype(np.int32).transpose(0, 2, 1).reshape(64, 16)
    assert np.array_equal(computed(instruction("add_int8", "amx-int8"), left, right, sums), expected)


def test_the_configuration_is_laid_out_as_the_manual_says():
    configuration = tiles.configuration()
    assert len(configuration) == 64 and configuration[:2] == b"\x01\x00"  # the palette; no row to resume at
    assert [int.from_bytes(configuration[16 + 2 * tile : 18 + 2 * tile], "little") for tile in range(16)] == (
        [64] * 8 + [0] * 8)  # bytes of a row
    assert list(configuration[48:]) == [16] * 8 + [0] * 8  # rows


PRINT_ASSEMBLY = """
import torch
from numba import cfunc
from slotwise.compute.kernels.cpu.products import linear_bf16, linear_blocks
from slotwise.compute.kernels.cpu.products.block_layout import layout_of
from slotwise.compute.kernels.cpu.products.quantize import FORMATS

blocks = linear_blocks.product_kernel(layout_of(FORMATS["int8"]), torch.bfloat16, "amx_int8")
for code in (linear_bf16.PRODUCT["amx"].code, blocks):
    print(cfunc("void(int64)", nopython=True)(code._entry)._library.get_asm_str())
    print("next")
"""
SAPPHIRE_RAPIDS = {
    "NUMBA_CPU_NAME": "sapphirerapids",
    "NUMBA_CPU_FEATURES": "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512bf16,+avx512vnni,+fma,+amx-tile,"
                          "+amx-bf16,+amx-int8"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="wants a compiler for x86-64")
def test_for_sapphire_rapids_kernels_become_instructions_on_tiles():
    done = subprocess.run([sys.executable, "-c", PRINT_ASSEMBLY], env=os.environ | SAPPHIRE_RAPIDS, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all("tilerelease" in assembly for assembly in done.stdout.split("next\n")[:2])
    lines = [line.split() for line in done.stdout.splitlines()]
    used = {line[0] for line in lines if line}
    assert used > {"ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tdpbsud", "tilestored", "tilerelease"}
    for name in ("tdpbf16ps", "tdpbsud"):
        operands = {"".join(line[1:]) for line in lines if line and line[0] == name}  # right, left, sums
        assert operands == {f"%tmm{6 + half},%tmm{4 + row},%tmm{2 * row + half}" for row in (0, 1) for half in (0, 1)}

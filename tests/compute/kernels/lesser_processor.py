"""Run before the kernels' tests on a lesser processor: is it one?"""

from __future__ import annotations

import torch
from numba import cfunc
from support.product_paths import assembly_of_products, check_sums_of_bytes

from slotwise.compute.kernels.cpu import pointwise
from slotwise.compute.kernels.cpu.simd import FLOAT32


def _norm(words):
    pointwise._norm(words, FLOAT32, FLOAT32)


def test_nothing_is_compiled_for_avx512():
    assert torch.backends.cpu.get_cpu_capability() == "AVX2"
    code = cfunc("void(int64)", nopython=True)(_norm)._library.get_asm_str()
    assert "ymm" in code and "zmm" not in code


def test_bytes_are_added_by_what_the_processor_has():
    check_sums_of_bytes(assembly_of_products(), "vpmaddubsw", "vpmaddwd")

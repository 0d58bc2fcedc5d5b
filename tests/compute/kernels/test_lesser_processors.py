"""The kernels' tests once more, as on processors without AVX-512, or without its later parts: slower, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.product_paths import check_sums_of_bytes

from slotwise.compute.kernels.cpu.processor import AVX512, has
from slotwise.compute.kernels.cpu.products.paths import VARIABLE

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "avx2",
           "ONEDNN_MAX_CPU_ISA": "AVX2"}
SKYLAKE = {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""}


# Of the packed blocks a type of each way to unpack codes and scales.
BLOCKS = "test_products and (Q2_K or Q4_K or Q6_K or Q8_0 or IQ4_NL) or rows_of_a_table and Q6_K"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processor", "names", "chosen"), [
    (HASWELL, ("lesser_processor", "test_cpu_tokens", "test_cpu_attention", "test_int8_cache", "test_linear_blocks"),
     f"(not test_linear_blocks or {BLOCKS}) and not (both_sides or long_chunk or decode_rows or chunk_rows)"),
    pytest.param(SKYLAKE, ("test_cpu_tokens", "test_quantize"), "",
                 marks=pytest.mark.skipif(not AVX512, reason="wants a processor with AVX-512"))],
    ids=["without-avx512", "without-vnni-and-halves"])
def test_kernels_are_right(processor, names, chosen):
    """One process for all of a processor: importing torch takes it longer than many of the tests."""
    tests = [f"tests/compute/kernels/{name}.py" for name in names]
    environment = os.environ | processor
    environment.pop(VARIABLE, None)  # a path that is forced for this processor may not be there on that one
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *tests], env=environment,
        capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


RUN_AS_WITH_AVX_VNNI = """
import sys
import pytest
from slotwise.compute.kernels.cpu import processor
from slotwise.compute.kernels.cpu.products import linear_blocks, paths

linear_blocks.has_vnni_gemm = lambda: True
assert paths.quantized("") == "vnni" and not processor.AVX512
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "vnni or same_integers and Q8_0",
                      *(f"tests/compute/kernels/{name}.py" for name in ("test_quantize", "test_linear_blocks"))]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not has("avx512vnni"), reason="wants a processor with AVX-512 VNNI")
def test_products_of_bytes_are_right_in_vectors_of_256_bits():
    """As on a processor with AVX-VNNI, by AVX-512's instruction for such vectors, which computes the same."""
    environment = os.environ | HASWELL | {"NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512vl,+avx512vnni"}
    environment.pop(VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", RUN_AS_WITH_AVX_VNNI], env=environment, capture_output=True, text=True,
                          cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


PRINT_ASSEMBLY = """
from support.product_paths import assembly_of_products
print(assembly_of_products())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="wants a compiler for x86-64")
def test_with_avx_vnni_bytes_are_added_by_its_instruction():
    """What Haswell has in its place: `lesser_processor.py`."""
    target = {"NUMBA_CPU_NAME": "alderlake", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avxvnni",
              "ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PRINT_ASSEMBLY], env=os.environ | target, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    check_sums_of_bytes(done.stdout, "{vex} vpdpbusd")

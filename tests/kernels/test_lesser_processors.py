"""The kernels' tests once more, as on processors without AVX-512, or without its later parts: slower, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.kernels.cpu.paths import VARIABLE
from slotwise.kernels.cpu.processor import AVX512

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "avx2",
           "ONEDNN_MAX_CPU_ISA": "AVX2"}
SKYLAKE = {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processor", "names"), [
    (HASWELL, ("lesser_processor", "test_cpu_tokens", "test_cpu_attention", "test_int8_cache")),
    pytest.param(SKYLAKE, ("test_cpu_tokens", "test_linear_int"),
                 marks=pytest.mark.skipif(not AVX512, reason="wants a processor with AVX-512"))],
    ids=["without-avx512", "without-vnni-and-halves"])
def test_kernels_are_right(processor, names):
    tests = [f"tests/kernels/{name}.py" for name in names]
    environment = os.environ | processor
    environment.pop(VARIABLE, None)  # a path that is forced for this processor may not be there on that one
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], env=environment,
        capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

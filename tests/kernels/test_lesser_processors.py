"""The kernels' tests once more, as on a processor without AVX-512: slower, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "avx2",
           "ONEDNN_MAX_CPU_ISA": "AVX2"}
NAMES = ("lesser_processor", "test_cpu_tokens", "test_cpu_attention", "test_int8_cache")
TESTS = [f"tests/kernels/{name}.py" for name in NAMES]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_are_right_without_avx512():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS], env=os.environ | HASWELL,
        capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

"""The kernels' tests once more, as on a processor without AVX-512: slower, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "avx2",
           "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROBE = """
import torch
from numba import cfunc
from slotwise.kernels.cpu import pointwise
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
code = cfunc("void(int64)", nopython=True)(pointwise._norm_float32)._library.get_asm_str()
assert "ymm" in code and "zmm" not in code
"""


def run(*arguments: str) -> None:
    """Run an interpreter on the lesser processor."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | HASWELL, capture_output=True, text=True,
        cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_are_right_without_avx512():
    run("-c", PROBE)
    run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/test_cpu_tokens.py",
        "tests/kernels/test_cpu_attention.py")

"""When Triton is imported, and what is said where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kernels.cuda.device import DEVICE, KERNELS

from slotwise.kernels.base import Kernels


def run(code: str) -> str:
    """What a process without the interpreter prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_the_cpu_needs_no_triton():
    code = (
        "import sys, slotwise, slotwise.compose.engine; from slotwise.kernels.select import choose; choose('cpu');"
        "print([name for name in sys.modules if name.split('.')[0] == 'triton' or 'kernels.cuda' in name])")
    assert run(code).strip() == "[]"


def test_compiled_kernels_refuse_the_cpu():
    code = (
        "from slotwise.kernels.cuda import CudaKernels\n"
        "try: CudaKernels('cpu')\n"
        "except ValueError as error: print(error)")
    assert "TRITON_INTERPRET=1" in run(code)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_there_are_no_graphs_and_no_haste():
    assert KERNELS.device.type == "cpu"
    assert KERNELS.record(lambda: None) is None
    assert all(hasattr(KERNELS, name) for name in vars(Kernels) if not name.startswith("_"))

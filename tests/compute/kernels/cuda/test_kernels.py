"""When Triton is imported, and what is said where it cannot run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.cuda_device import DEVICE, KERNELS

from slotwise.compute.kernels.interface import DeltaShape, Kernels, StateKernels

CODE = """
import sys, slotwise, slotwise.compose.engine_builder
from slotwise.compute.kernels.select import choose
choose("cpu")
print([name for name in sys.modules if name.split(".")[0] == "triton" or "kernels.cuda" in name])
from slotwise.compute.kernels.cuda import CudaKernels
try:
    CudaKernels("cpu")
except ValueError as error:
    print(error)
"""


def test_the_cpu_needs_no_triton_and_is_refused_by_what_was_compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded, refusal = ended.stdout.splitlines()
    assert loaded == "[]" and "TRITON_INTERPRET=1" in refusal


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_there_are_no_graphs_and_no_haste():
    assert KERNELS.device.type == "cpu"
    assert KERNELS.record(lambda: None) is None
    assert all(hasattr(KERNELS, name) for name in {**vars(Kernels), **vars(StateKernels)} if not name.startswith("_"))


def test_layers_with_recurrent_states_are_refused():
    assert "recurrent state are not supported on device cuda" in KERNELS.state_refusal
    with pytest.raises(ValueError, match="recurrent state are not supported on device cuda"):
        KERNELS.allocate_cache(1, 16, DeltaShape(1, 1, 8, 8, 4), torch.float32)


def test_results_depend_on_the_batch_and_the_reason_is_told():
    assert "on device cuda products by cuBLAS depend" in KERNELS.batch_dependence(torch.bfloat16)

"""The kernels compile for the GPUs they are meant for, by the code that launches them.  None is needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels.cuda.device")

SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes a program may have, by compute capability
pytestmark = pytest.mark.slow


def compiled(capability: int, *launches: tuple[str, int, int]) -> dict[str, dict]:
    """What became of each kernel; of one compiled twice, the last."""
    script = Path(__file__).with_name("compiled.py")
    command = [sys.executable, "-W", "ignore", str(script), str(capability), json.dumps(launches)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all(kernel["shared"] <= SHARED[capability] for kernel in kernels), kernels
    return {kernel["kernel"]: kernel for kernel in kernels}


def test_for_hopper():
    kernels = compiled(90, ("bfloat16", 128, 0))
    assert kernels["attend_tiles"]["wgmma"] and kernels["attend_tiles"]["copies"], "not Hopper's products"
    assert kernels["attend_splits"]["mma"] and kernels["attend_splits"]["copies"], "loads are not pipelined"


def test_for_ampere():
    kernels = compiled(80, ("bfloat16", 128, 64))
    assert kernels["attend_tiles"]["mma"] and kernels["attend_tiles"]["copies"]


def test_float32_is_not_rounded_to_tf32():
    kernels = compiled(80, ("float32", 16, 0))
    assert not any(kernel["tf32"] or kernel["mma"] for kernel in kernels.values())

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


HOPPER, AMPERE, EXACT = (90, "bfloat16", 128, 0), (80, "bfloat16", 128, 64), (86, "float32", 16, 0)


@pytest.fixture(scope="module")
def compiled() -> dict[int, dict[str, dict]]:
    """What became of each kernel, by compute capability; of one compiled twice for the same, the last."""
    script = Path(__file__).with_name("compiled.py")
    command = [sys.executable, "-W", "ignore", str(script), json.dumps([HOPPER, AMPERE, EXACT])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels: dict[int, dict[str, dict]] = {}
    for line in ended.stdout.splitlines():
        kernel = json.loads(line)
        assert kernel["shared"] <= SHARED[kernel["target"]], kernel
        kernels.setdefault(kernel["target"], {})[kernel["kernel"]] = kernel
    assert kernels.keys() == SHARED.keys()
    assert len({frozenset(found) for found in kernels.values()}) == 1, "not every kernel for every GPU"
    return kernels


def test_for_hopper(compiled):
    kernels = compiled[90]
    assert kernels["attend_tiles"]["wgmma"] and kernels["attend_tiles"]["copies"], "not Hopper's products"
    assert kernels["attend_segments"]["mma"] and kernels["attend_segments"]["copies"], "loads are not pipelined"


def test_for_ampere(compiled):
    kernels = compiled[80]
    assert kernels["attend_tiles"]["mma"] and kernels["attend_tiles"]["copies"]


def test_float32_is_not_rounded_to_tf32(compiled):
    assert not any(kernel["tf32"] or kernel["mma"] for kernel in compiled[86].values())

"""The kernels as machine code for GPUs that are not here: what is committed, and what has changed since."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `benchmarks` is run from the repository's root and never installed

from benchmarks.gpu_compile.architectures import ARCHITECTURES, programs_at_once  # noqa: E402
from benchmarks.gpu_compile.results import faults, load, programs  # noqa: E402
from benchmarks.gpu_compile.table import TABLE, written  # noqa: E402

A100, L40S, H100 = (ARCHITECTURES[capability] for capability in (80, 89, 90))
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("architecture", "warps", "registers", "shared", "expected"), [
    (A100, 8, 64, 0, 4), (A100, 8, 32, 0, 8),  # registers, then threads
    (A100, 1, 16, 0, 32), (L40S, 1, 16, 0, 24),  # programs
    (A100, 4, 32, 60 << 10, 2), (H100, 4, 32, 60 << 10, 3),  # shared memory, a KiB of each the system's
    (A100, 8, 255, 0, 1), (A100, 8, 33, 0, 6), (L40S, 4, 32, 100 << 10, 0),
])  # fmt: skip
def test_how_many_programs_run_at_once(architecture, warps, registers, shared, expected):
    assert programs_at_once(architecture, warps, registers, shared) == expected


def test_the_committed_kernels_hold_their_bounds():
    kernels = load().values()
    assert {kernel["capability"] for kernel in kernels} == set(ARCHITECTURES)
    assert [fault for kernel in kernels for fault in faults(kernel)] == []


def test_the_table_is_that_of_the_committed_kernels():
    assert TABLE.read_text() == written(list(load().values()))


@pytest.mark.parametrize(("change", "fault"), [
    ({"stack": 8}, "spills 8 bytes"), ({"shared": 1 << 20}, "shared memory"), ({"claimed": 33}, "claims 33"),
    ({"products": []}, "without tensor cores"), ({"kind": "float32"}, "TF32")])
def test_each_bound_catches(change, fault):
    kernel = next(kernel for kernel in load().values() if kernel["kernel"] == "attend_tiles" and kernel["products"])
    assert programs(kernel) and not faults(kernel)
    found = faults(kernel | change)
    assert len(found) == 1 and fault in found[0] and "attend_tiles" in found[0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_has_changed_compiles_and_holds_the_bounds():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.gpu_compile", "--check", "--processes", "1"]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "all bounds hold" in ended.stdout


SPILLING = """
import sys
from benchmarks.gpu_compile import launches, worker
from slotwise.compute.kernels.cuda.configs import DecodeConfig, PrefillConfig, Tuning

launches.default_tuning = lambda *_: Tuning(PrefillConfig(128, 128, 4, 2), DecodeConfig(64, 4, 3))
worker.launches = lambda capability: [launches._attention("bfloat16", 64, "plain", capability)]
sys.argv[1:] = ["0", "1", "80"]
worker.main()
"""


@pytest.mark.slow
def test_a_tile_too_large_for_its_registers_is_caught():
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", SPILLING], cwd=ROOT, env=ENVIRONMENT, input="[]", capture_output=True,
                           text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    kernels = {kernel["kernel"]: kernel for kernel in map(json.loads, ended.stdout.splitlines())}
    assert kernels.keys() == {"attend_tiles", "attend_segments", "combine_segments"}
    assert any("spills" in fault for fault in faults(kernels["attend_tiles"]))
    assert not faults(kernels["attend_segments"])

"""Helpers that compile: called early where nothing was compiled yet, told what to do, or let go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slotwise.compute.kernels.cpu.jit import store, workers

EARLY = """
from slotwise.compute.kernels.cpu.jit import workers
workers.call_early("cpu")
called = list(workers._waiting)
print(len(called))
"""
COMPILE = EARLY + """
import torch
from slotwise.compute.kernels.cpu import pointwise
from slotwise.compute.kernels.cpu.jit import compiler
codes = [pointwise.NORM[torch.float32, torch.float32], pointwise.SILU_MUL[torch.float32], pointwise.EMBED]
{before}
compiler.compile_all(codes)
print(*(code.is_on_disk for code in codes), workers.are_waiting(), *(helper.wait() for helper in called))
"""
LET_GO = EARLY + """
workers.dismiss()
print(workers.are_waiting(), *(helper.wait() for helper in called))
"""

WITHOUT_FILES = EARLY + """
import resource, torch
from slotwise.compute.kernels.cpu import pointwise
from slotwise.compute.kernels.cpu.jit import compiler
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(pointwise.EMBED.is_on_disk)
compiler.compile_all([pointwise.EMBED])
print(pointwise.EMBED.is_on_disk)
"""


@pytest.fixture
def processors() -> int:
    """Those that helpers and the one who calls them share."""
    return len(os.sched_getaffinity(0))


def run(script: str, home) -> list[str]:
    """What a fresh interpreter prints."""
    environment = os.environ | {"XDG_CACHE_HOME": str(home)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_helpers_are_called_before_anything_is_compiled_and_leave_when_it_is(tmp_path, processors):
    called = min(workers.MOST, processors - 1)
    first, second = run(COMPILE.format(before=""), tmp_path)
    assert int(first) == called
    assert second.split() == ["True", "True", "True", "False", *["0"] * called]
    assert run(WITHOUT_FILES, tmp_path) == ["0", "True", "True"], "everything is there, and needs no temporary folder"


@pytest.mark.slow
def test_a_helper_that_has_died_loses_nothing(tmp_path):
    dies = "for helper in called: helper.kill(); helper.wait()"
    assert run(COMPILE.format(before=dies), tmp_path)[1].startswith("True True True False")


def test_helpers_whom_nobody_needs_end(tmp_path, processors):
    called = min(workers.MOST, processors - 1)
    assert run(LET_GO, tmp_path) == [str(called), " ".join(["False", *["0"] * called])]


@pytest.mark.parametrize(("device", "has_gpu", "wanted"), [
    ("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False),
    ("reference", False, False)])
def test_helpers_are_called_for_the_cpu_alone(monkeypatch, tmp_path, device, has_gpu, wanted):
    called = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(workers, "GPU", tmp_path if has_gpu else tmp_path / "none")
    monkeypatch.setattr(workers, "_call", called.append)
    workers.call_early(device)
    assert bool(called) == wanted


def test_kernels_are_kept_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.wanted() == tmp_path / "slotwise" / "kernels"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert store.wanted() == tmp_path / "mine"


def test_a_helper_whose_engine_has_ended_ends_without_a_word(tmp_path):
    """The folder of claims is removed when the engine process ends, which need not wait for its helpers."""
    from slotwise.compute.kernels.cpu import pointwise

    work = f"{tmp_path / 'gone'}\n{pointwise.EMBED.name}"
    done = subprocess.run([sys.executable, "-m", workers.__package__], input=work, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

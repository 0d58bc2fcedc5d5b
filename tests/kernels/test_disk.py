"""Where compiled kernels are kept, and when they are compiled anew."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import pytest
import torch

from slotwise.kernels.cpu import disk

COMPILE = """
import torch
from slotwise.kernels.cpu import compiled, pointwise
codes = [pointwise.NORM[torch.float32], pointwise.SILU_MUL[torch.float32]]
print(*(code.is_on_disk for code in codes))
compiled.compile_all(codes)
print(*(code.is_on_disk for code in codes))
"""


def run(script: str, **environment: str) -> list[str]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("where", "name", "value"), [
    (numba.config, "CPU_NAME", "another"), (numba.config, "CPU_FEATURES", "+another"),
    (torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")],
    ids=["processor", "features", "torch's capability"])
def test_code_for_another_processor_has_a_folder_of_its_own(monkeypatch, where, name, value):
    key_here = disk.key()
    assert disk.key() == key_here
    monkeypatch.setattr(where, name, value)
    assert disk.key() != key_here


@pytest.mark.slow
def test_kernels_are_compiled_once_and_shared_out(tmp_path):
    folder = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run(COMPILE, **folder) == ["False False", "True True"]
    assert run(COMPILE, **folder) == ["True True", "True True"]


@pytest.mark.slow
def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path):
    nowhere = tmp_path / "file"
    nowhere.touch()
    assert run(COMPILE, XDG_CACHE_HOME=str(nowhere)) == ["False False"] * 2


def test_only_folders_used_last_are_kept(tmp_path):
    for age in range(disk.KEPT + 3):
        (tmp_path / f"{age}").mkdir()
        (tmp_path / f"{age}" / "code").touch()
        os.utime(tmp_path / f"{age}", (1000 - age, 1000 - age))
    disk.remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{age}" for age in range(disk.KEPT)]

"""Folders of a user whom the system does not know, and where no temporary file can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, resource, sys
from slotwise.kernels.cpu.jit import store
from slotwise.observe import step_time
{before}
print(store.wanted(), step_time.path_for(["a"]).parent, *store.homes(), sep="\\n")
"""


def told(before: str, **more: str) -> list[Path]:
    """The folder of kernels, that of step times, and all folders that kernels may be in."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")} | more
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(before=before)], env=environment, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an unknown user")
def test_a_user_without_a_home_has_a_temporary_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mine = tmp_path / "slotwise-54321"
    assert told("os.setuid(54321); import tempfile; tempfile.tempdir = os.environ['TMPDIR']", TMPDIR=str(tmp_path)) == [
        mine / "slotwise" / "kernels", mine / "slotwise" / "step-times", mine / "slotwise" / "kernels",
        mine / "kernels"]


def test_a_home_is_used_where_no_temporary_file_can_be_written(tmp_path: Path) -> None:
    found = told("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", HOME=str(tmp_path))
    kept = tmp_path / ".cache" / "slotwise"
    assert found[:3] == [kept / "kernels", kept / "step-times", kept / "kernels"] and len(found) == 4

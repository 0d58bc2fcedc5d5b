"""Folders for what is kept: of a user whom the system does not know, and those that other users can change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slotwise.compute.kernels.cpu.products import paths
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.observe import step_time_store as step_time

SCRIPT = """
import os, resource, sys
from slotwise.compute.kernels.cpu.jit import store
from slotwise.observe import step_time_store as step_time
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


def kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The files of step times and of the path of products in a user's folder of caches, as this user wrote them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    times = StepTimeModel()
    for number in range(200):
        times.step(Work(number % 7 + 1, 1, 100, 0.0), number, number + 0.5)
    path = step_time.path_for(["a"])
    step_time.save(path, times)
    return path, paths.keep("bf16")


def found(path: Path) -> tuple[bool, str]:
    return step_time.load(path).is_trained, paths.read()


def test_what_is_kept_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = kept(tmp_path, monkeypatch)
    assert found(path) == (True, "bf16")


@pytest.mark.parametrize("place", ["cache", "cache/slotwise", "cache/slotwise/step-times"])
def test_nothing_is_read_from_folders_that_other_users_can_change_nor_written_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    path, choice = kept(tmp_path, monkeypatch)
    (tmp_path / place).chmod(0o777)
    assert found(path) == (False, "" if choice.is_relative_to(tmp_path / place) else "bf16")
    step_time.save(path.with_name("other.json"), StepTimeModel())
    assert not path.with_name("other.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_folder_that_another_user_made_or_leads_elsewhere_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = kept(tmp_path, monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "cache", tmp_path / "mine")
    (tmp_path / "cache").symlink_to(tmp_path / "mine")
    assert found(path) == (True, "bf16"), "a link of this user's own"
    os.chown(tmp_path / "cache", 12345, 12345, follow_symlinks=False)
    assert found(path) == (False, "")
    (tmp_path / "cache").unlink()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    os.chown(tmp_path / "cache", 12345, 12345, follow_symlinks=False)
    step_time.save(path, StepTimeModel())
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_choice_that_is_no_file_or_too_deep_is_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, choice = kept(tmp_path, monkeypatch)
    choice.write_text("[" * 60_000)
    assert found(path) == (True, "")
    choice.unlink()
    os.mkfifo(choice)
    assert found(path) == (True, "")

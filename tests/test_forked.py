"""Tests in forked processes report the same as in a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST = """
import os, signal, subprocess, sys, time, warnings
import pytest


@pytest.fixture(scope="session")
def of_session(tmp_path_factory):
    yield tmp_path_factory.mktemp("made")
    open(f"torn {os.getpid()}", "w").close()


@pytest.fixture
def breaks():
    yield
    raise ValueError("when it was torn down")


def test_passes(of_session):
    (of_session / "its own").touch()


def test_fails():
    print("printed before")
    assert 1 == 2


def test_is_skipped():
    pytest.skip("for a reason")


def test_warns():
    warnings.warn("said once", UserWarning)


def test_captures(capfd):
    subprocess.run(["echo", "of a child"])
    assert capfd.readouterr().out == "of a child\\n"


def test_breaks_behind_itself(breaks):
    pass


@pytest.mark.timeout(0.2)
def test_hangs():
    time.sleep(100)


def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def test_behind_the_crash(of_session):
    assert list(of_session.iterdir()) == []
"""
SECOND = """
def test_of_another_file():
    pass
"""
TOLD = (
    "AssertionError", "printed before", "ValueError: when it was torn down", "Timeout (>0.2s)",
    "its process ended with exit code -9", "UserWarning: said once", "for a reason",
    "3 failed, 6 passed, 1 skipped, 1 warning, 1 error in ")


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_every_outcome_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "support.forked", "-p", "no:cacheprovider", "--forks", "2",
               "--basetemp", str(tmp_path / "temporary")]
    ended = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
                           capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stdout
    assert [told for told in TOLD if told not in ended.stdout] == [], ended.stdout
    assert len(list(tmp_path.glob("torn *"))) == 1  # by the process that went on, and not by the one that crashed

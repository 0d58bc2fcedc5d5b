"""Nothing that tests have started outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import leftovers
from support.live_server import eventually

TEST = """
import os, subprocess, sys, time

CHILD = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); subprocess.run(sys.argv[1:])"
SLEEPER = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def test_that_is_interrupted():
    command = [sys.executable, "-c", CHILD, sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\\n"
        open("mark", "w").write(os.environ["STARTED_BY_TESTS"])
        time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("forks", "sent"), [(0, signal.SIGKILL), (1, signal.SIGINT), (1, signal.SIGKILL)])
def test_processes_of_tests_end_with_them(tmp_path: Path, forks: int, sent: signal.Signals) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider",
               "-p", "support.forked", "--forks", str(forks), "test_it.py"]
    mark = tmp_path / "mark"
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
                          stdout=subprocess.DEVNULL, start_new_session=True) as tests:
        eventually(lambda: mark.exists() and mark.read_text())
        assert len(leftovers.running(mark.read_text())) == 2
        os.killpg(tests.pid, sent) if sent == signal.SIGINT else tests.send_signal(sent)
    eventually(lambda: not leftovers.running(mark.read_text()))

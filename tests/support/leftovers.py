"""Ends what a test process has started, and what that has started, also where the test process is killed.

Ctrl-C gives test processes a few seconds and then kills them, with fixtures whose servers would run on.  A guard waits
for the end of the process and kills all that carry its mark in their environment.  It needs Linux' /proc.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "STARTED_BY_TESTS"  # not SLOTWISE_...: tests leave such variables out
OFTEN = 0.25  # seconds
ROUNDS = 100  # of killing: what is killed may have started another one


def guard() -> None:
    """Marks all processes that this one starts from here on, and starts the guard that ends them after it."""
    before = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = secrets.token_hex(8)
    if sys.platform == "linux":
        subprocess.Popen([sys.executable, "-IS", __file__, str(os.getpid()), os.environ[MARK]], env=before,
                         stdin=subprocess.DEVNULL, start_new_session=True)  # a session: Ctrl-C does not reach it


def running(mark: str) -> list[int]:
    """Processes with `mark`.  Those that have ended and were not waited for have no environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def main(parent: int, mark: str) -> None:
    while os.getppid() == parent:
        time.sleep(OFTEN)
    for _ in range(ROUNDS):
        if not (left := running(mark)):
            break
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(OFTEN)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

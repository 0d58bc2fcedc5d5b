"""Starts the engine process, from a process that never imports torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from slotwise.engine.channel import frame, pair
from slotwise.engine.config import EngineConfig

# Compute threads that move between cores meet this process's work there and keep each other waiting at every kernel:
# the mixed trace over HTTP took anything from 43 to 71 s without this, and 41 to 43 s with it.
THREADS_STAY = {"OMP_PROC_BIND": "true"}


def launch_engine(config: EngineConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The engine process, loading already, and our end of its channel.  Closing that end stops the process."""
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "slotwise.compose.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, env=THREADS_STAY | os.environ)
    ours.sendall(frame(msgspec.msgpack.encode(config)))
    return process, ours

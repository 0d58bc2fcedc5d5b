"""Starts the engine process, from a process that never imports torch."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec

from slotwise.engine.channel import frame, pair
from slotwise.engine.config import EngineConfig


def launch_engine(config: EngineConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The engine process, loading already, and our end of its channel.  Closing that end stops the process."""
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "slotwise.compose.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL)
    ours.sendall(frame(msgspec.msgpack.encode(config)))
    return process, ours

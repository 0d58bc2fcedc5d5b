"""Starts the engine process from a process that never imports torch."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from slotwise import child, spawn
from slotwise.engine.config import EngineConfig
from slotwise.engine.ipc import frame, pair
from slotwise.model.generation_config import absolute

# Compute threads that move between cores compete with this process there: when all threads synchronised at every
# kernel, the mixed trace over HTTP took 43 to 71 s without this, and 41 to 43 s with it.
THREADS_STAY = {"OMP_PROC_BIND": "true"}


class ChildProcess:
    """A child process with one end of a channel.  Closing the other end stops it.

    Args:
        command: its arguments; the file descriptor of its end is appended.
        options: of `subprocess.Popen`, see `spawn.start`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.started = time.monotonic()
        self.channel, theirs = pair()
        with theirs:
            descriptor = theirs.fileno()
            try:
                self.process = spawn.start(
                    [*command, str(descriptor)], pass_fds=[descriptor], stdin=subprocess.DEVNULL, **options)
            except BaseException:
                self.channel.close()
                raise

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def held_bytes(self) -> int:
        """Memory that is the system's again when the process ends; 0 where the system does not tell."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    def kill(self) -> None:
        self.process.kill()


def launch_engine(config: EngineConfig, log_format: str, more: Mapping[str, str] = {}) -> ChildProcess:
    """Starts the engine process, which begins to load.

    Args:
        log_format: of its stderr: see observe.lines.
        more: variables of its environment that replace this process' own, as those of `compose.placement`.
    """
    process = ChildProcess(
        child.python("slotwise.compose.worker", log_format), env=THREADS_STAY | child.environment() | dict(more))
    process.channel.sendall(frame(msgspec.msgpack.encode(absolute_paths(config))))
    return process


def absolute_paths(config: EngineConfig) -> EngineConfig:
    """Returns `config` for a process with another current folder."""
    return replace(
        config, model=str(Path(config.model).absolute()), generation_config=absolute(config.generation_config))

"""A real `slotwise serve`, seen from outside: its processes, their memory, its metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

READY = re.compile(r"Ready after .* on (http://\S+)")
BLOCKS = re.compile(r"(\d+) blocks of (\d+) tokens")
EXIT_SECONDS = 60.0
MIB = 1 << 20
PAGE = resource.getpagesize()


@dataclass
class Server:
    """A running server.  `log` is the file of its stderr; `ready` the fields of the ready line, if lines are JSON."""

    process: subprocess.Popen[str]
    url: str
    num_blocks: int
    block_size: int
    log: Path
    ready: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine_pid(self) -> int:
        """Returns the current engine process; 0 without one."""
        for pid in children(self.process.pid):
            if b"slotwise.compose.engine_process" in _command(pid):
                return pid
        return 0

    def said(self) -> str:
        """Returns the end of its stderr."""
        return self.log.read_text(errors="replace")[-3000:]

    def memory(self) -> int:
        """Returns the resident bytes of all its processes, shared pages counted twice.

        The kernel keeps this figure; dividing shared pages would make it walk all pages and stall the server.
        """
        pids = [self.process.pid, *children(self.process.pid)]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * PAGE


@contextlib.contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Serves the built-in model on a free port, until the block ends.

    Args:
        environment: variables that replace or extend those of this process.

    Raises:
        RuntimeError: the server ended before it was ready.
    """
    command = [sys.executable, "-m", "slotwise.cli", "serve", "--port", "0", *arguments]
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | (environment or {})) as process:
        try:
            yield _greeted_json(process, Path(log.name)) if "json" in arguments else _greeted(process, Path(log.name))
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _greeted(process: subprocess.Popen[str], log: Path) -> Server:
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if found := READY.search(line):
            url = found[1]
        elif url and (found := BLOCKS.search(line)):
            return Server(process, url, int(found[1]), int(found[2]), log)
    raise RuntimeError(f"the server ended before it was ready: {Server(process, '', 0, 0, log).said()}")


def _greeted_json(process: subprocess.Popen[str], log: Path) -> Server:
    """Reads the ready line of `--log-format json`, an object on stderr."""
    while process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if "url" in (fields := json.loads(line)):
                    return Server(process, fields["url"], fields["blocks"], fields["block_size"], log, fields)
        time.sleep(0.05)
    raise RuntimeError(f"the server ended before it was ready: {Server(process, '', 0, 0, log).said()}")


def children(pid: int) -> list[int]:
    """Returns the running children of `pid`."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, tasks.read_text().split())
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Metrics:
    """One reading of `/metrics`: samples summed over the labels that are not given."""

    def __init__(self, text: str) -> None:
        self._lines = [line for line in text.splitlines() if not line.startswith("#")]

    @classmethod
    async def read(cls, session: aiohttp.ClientSession, server: Server) -> Metrics:
        async with session.get(f"{server.url}/metrics") as response:
            return cls(await response.text())

    def __getitem__(self, name: str) -> float:
        """Returns the sum of `name`, without its prefix; `name{label="value"` selects samples."""
        start = f"slotwise:{name}" + ("" if "{" in name else "{")
        return sum(float(line.rpartition(" ")[2]) for line in self._lines if line.startswith(start))

    @property
    def num_inside(self) -> float:
        """Returns the number of running and waiting requests."""
        return self["num_requests_running"] + self["num_requests_waiting"]

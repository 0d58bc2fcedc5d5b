"""Replicas as processes of this machine: `slotwise serve` children, each on a port and on processors of its own.

What one writes to stderr is passed on line by line, each with the replica's name: as text behind `[replica 0]`, as JSON
in the field `replica`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import IO

from slotwise import child, spawn
from slotwise.observe import lines
from slotwise.transfer.settings import CONSUMER, PRODUCER, SHARED_MEMORY

HOST = "127.0.0.1"
MAX_LINE = 64 << 10  # bytes; a longer line is passed on in parts
LAST_WORDS = 1.0  # seconds; a process of the replica's that has not ended yet may keep its stderr open


class ServeProcess:
    """A `slotwise serve` process, which the system kills when this one ends.

    Args:
        name: of the replica; "": its lines are told apart otherwise.
        arguments: of the command, but its host and port.
        variables: of its environment, beside this process's; secrets, which no command line may have.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        command = child.python("slotwise.cli.replica_main", *arguments, "--host", HOST, "--port", str(port))
        self._process = spawn.start(command, env={**os.environ, **child.environment(), **variables}, cwd=os.getcwd(),
                                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self._process.stderr is not None
        self._said = threading.Thread(
            target=_pass_on, args=(self._process.stderr, name), name=f"stderr of replica {name}", daemon=True)
        self._said.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kills it, and waits for its end and its last words."""
        self._process.kill()
        self._process.wait()
        self._said.join(LAST_WORDS)


def _pass_on(stderr: IO[bytes], name: str) -> None:
    """Writes the lines of a replica to this process's stderr, until it ends."""
    with stderr:
        while line := stderr.readline(MAX_LINE):
            text = named(line.decode(errors="replace").rstrip("\n"), name, lines.chosen())
            with contextlib.suppress(OSError, ValueError):  # stderr is closed: the replica must not wait for it
                sys.stderr.write(text + "\n")
                sys.stderr.flush()


def named(line: str, name: str, log_format: str) -> str:
    """Returns a line of a replica with its name."""
    if not name:
        return line
    if log_format != lines.JSON:
        return f"[replica {name}] {line}"
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):  # not written by Python
        fields = {"level": "info", "logger": "stderr", "message": line}
    return json.dumps({"replica": name} | fields)


def _free_port() -> int:
    """A port that is free now.  If another program takes it first, the replica ends, and the next one has another."""
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])


def roles(num_prefill: int, number: int) -> list[list[str]]:
    """Returns the options of `number` processes of this machine, the first of which compute prompts for the others."""
    ports = [_free_port() for _ in range(num_prefill)]
    shared: dict[str, object] = {"kv_connector": SHARED_MEMORY}
    configs = [shared | {"kv_role": PRODUCER, "kv_port": port} for port in ports]
    peers = {"peers": [f"{HOST}:{port}" for port in ports]}
    configs += [shared | {"kv_role": CONSUMER, "kv_connector_extra_config": peers}] * (number - num_prefill)
    return [["--kv-transfer-config", json.dumps(config)] for config in configs]


def shares(places: Sequence[int], number: int) -> list[list[str]]:
    """Returns the options that bind `number` replicas to `places`, processors in an order in which neighbours share.

    With fewer places than replicas, each has one thread, which the system may move.
    """
    if number == 1:
        return [[]]
    if len(places) < number:
        return [["--cpu-threads", "1", "--cpu-bind", "none"]] * number
    ends = [index * len(places) // number for index in range(number + 1)]
    return [["--cpu-bind", ",".join(map(str, places[begin:end]))] for begin, end in pairwise(ends)]

"""Two replicas with toy engines in processes of their own, and a front door before them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import fork_server
from support.live_server import Server, eventually, running

READY = re.compile(r"Ready after .* on (http://\S+)")


@dataclass
class Behind:
    """A front door, and the replicas behind it."""

    door: Server
    replicas: list[Server]
    key: str = ""

    def states(self) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return self.door.get("/replicas", **headers).json()["replicas"]

    def num_up(self) -> int:
        return sum(one["is_up"] for one in self.states())


@contextlib.contextmanager
def door_of(*arguments: str, log: Path) -> Iterator[Server]:
    process = fork_server.start(fork_server.CLI, "scale", "--port", "0", *arguments, stderr=log)
    try:
        for line in process.stdout:
            if found := READY.search(line):
                yield Server(found[1], process, 0, log)
                break
        else:
            raise AssertionError(f"the door ended before it was ready: {log.read_text()}")
    finally:
        process.terminate()
        process.wait(120)


@contextlib.contextmanager
def behind(folder: Path, path: Path, *settings: str, arguments: tuple[str, ...] = (), number: int = 2,
           key: str = "") -> Iterator[Behind]:
    """Args: settings: of the replicas; arguments: of the door; key: of both."""
    if key:
        settings, arguments = (*settings, f"api_keys={key}"), (*arguments, "--api-key", key)
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(running(folder, path / f"engine{index}", *settings)) for index in range(number)]
        urls = [one for replica in replicas for one in ("--replica-url", replica.url)]
        door = stack.enter_context(door_of(*urls, *arguments, log=path / "door"))
        found = Behind(door, replicas, key)
        eventually(lambda: found.num_up() == number)
        yield found

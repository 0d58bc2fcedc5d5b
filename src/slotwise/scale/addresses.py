"""Replicas at addresses: a name that resolves to several hosts stands for a replica on each.

Names are resolved again and again, so replicas that others start and stop, as Kubernetes behind a headless service or
Compose does, come and go without a word here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from slotwise.scale.replicas import Replicas

EVERY = 2.0  # seconds between two resolutions
GONE = 30.0  # seconds that a replica whose address is gone has to end its requests

logger = logging.getLogger(__name__)


class Addresses:
    """Args: urls: each http://HOST:PORT, without a path."""

    def __init__(self, urls: Sequence[str], replicas: Replicas) -> None:
        self._urls, self._replicas = urls, replicas
        self._task: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        if self._urls:
            self._task = asyncio.create_task(self._follow())

    def end(self) -> None:
        for task in (*self._leaving, *([self._task] if self._task is not None else [])):
            task.cancel()

    async def _follow(self) -> None:
        while True:
            found = [one for url in self._urls for one in await resolved(url)]
            known = self._replicas.names
            for url in dict.fromkeys(found):
                if _name(url) not in known:
                    self._replicas.add(_name(url), url)
            for name in known:
                if found and name not in map(_name, found):
                    task = asyncio.create_task(self._replicas.leave(name, GONE))
                    self._leaving.add(task)
                    task.add_done_callback(self._leaving.discard)
            await asyncio.sleep(EVERY)


def _name(url: str) -> str:
    return url.removeprefix("http://")


def checked(url: str) -> str:
    """Returns `url` without a slash at its end.  Raises ValueError: it is not the address of a replica."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError("must be an address such as http://127.0.0.1:8001")
    return f"http://{parts.netloc}"


async def resolved(url: str) -> list[str]:
    """The URLs of all hosts that the name in `url` means; none while it cannot be resolved."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("%s cannot be resolved: %s", host, error)
        return []
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}" for one in hosts]

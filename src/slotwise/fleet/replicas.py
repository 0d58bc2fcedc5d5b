"""All replicas of a front door: their processes where it has started them, and whether they show signs of life.

    start ──► silent ──► up ──► lost ──► pause 0.5, 1 ... 30 s ──► start
              (loading)   └──► draining ──► idle ──► SIGTERM ──► removed

A replica is lost when its process ends, or when it has not answered for `SILENCE` seconds; one that still loads may
take `LOADING`.  What waits for a lost one ends at once, and a new one takes its place.  Replicas at addresses, which
others start and stop, are only watched.

A name that resolves to several hosts stands for a replica on each.  Names are resolved again and again, so replicas
that others start and stop, as Kubernetes behind a headless service or Compose does, come and go without a word here.

A process of this machine is a `slotwise serve` child, on a port and on processors of its own.  What one writes to
stderr is passed on line by line, each with the replica's name: as text behind `[replica 0]`, as JSON in the field
`replica`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import IO, Protocol
from urllib.parse import urlsplit

import aiohttp

from slotwise.core.routing.fleet import Fleet
from slotwise.core.transfer.kv_transfer_config import CONSUMER, PRODUCER, SHARED_MEMORY
from slotwise.engine.supervisor import Backoff
from slotwise.errors import described
from slotwise.fleet.replica_adapters import ReplicaAdapters
from slotwise.fleet.upstream import ReplicaLost, Upstream
from slotwise.observe import lines
from slotwise.platform import child, spawn

HOST = "127.0.0.1"
MAX_LINE = 64 << 10  # bytes; a longer line is passed on in parts
LAST_WORDS = 1.0  # seconds; a process of the replica's that has not ended yet may keep its stderr open
POLL = 0.5  # seconds between two questions to a replica
LOOK = 0.1  # seconds between two looks at a process
SILENCE = 8.0  # seconds
LOADING = 900.0  # seconds that a process has to read its model
CONNECT = 5.0  # seconds
KEEP_ALIVE = 30.0  # seconds that idle connections are kept: less than a server keeps them

logger = logging.getLogger(__name__)
EVERY = 2.0  # seconds between two resolutions
GONE = 30.0  # seconds that a replica whose address is gone has to end its requests


# -- processes ---------------------------------------------------------------------------------------------------------


class ServeProcess:
    """A `slotwise serve` process, which the system kills when this one ends.

    Args:
        name: of the replica; "": its lines need no name.
        arguments: of the command, but its host and port.
        variables: added to its environment, for secrets, which must not appear on a command line.

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
    """Returns the options that bind `number` replicas to `places`, processors in an order in which neighbors share.

    With fewer places than replicas, each has one thread, which the system may move.
    """
    if number == 1:
        return [[]]
    if len(places) < number:
        return [["--cpu-threads", "1", "--cpu-bind", "none"]] * number
    ends = [index * len(places) // number for index in range(number + 1)]
    return [["--cpu-bind", ",".join(map(str, places[begin:end]))] for begin, end in pairwise(ends)]


# -- all replicas ------------------------------------------------------------------------------------------------------


class ReplicaProcess(Protocol):
    """A replica that this process has started."""

    url: str

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class _ReplicaPlace:
    """A replica's place in the fleet, which several processes may fill one after the other."""

    upstream: Upstream | None = None
    process: ReplicaProcess | None = None
    has_told: bool = False
    is_leaving: bool = False
    task: asyncio.Task[None] | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.5, longest=30.0, recovered=20.0))


class Replicas:
    """Args:
        adapters: receives what replicas report, and which are lost.
        launch: starts a replica's process, given its name; None: replicas are started by others.
        headers: of the door's own requests to replicas.
        on_lost: called with the name of each lost replica.
    """

    def __init__(self, fleet: Fleet, adapters: ReplicaAdapters, launch: Callable[[str], ReplicaProcess] | None,
                 headers: Mapping[str, str], on_lost: Callable[[str], None]) -> None:
        self.hopeless = asyncio.Event()
        self.changed = asyncio.Event()  # set when a replica has come up or is gone
        self.trouble = ""  # why the last process ended that never served
        self._fleet, self._adapters = fleet, adapters
        self._launch, self._headers, self._on_lost = launch, headers, on_lost
        self._kept: dict[str, _ReplicaPlace] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT), auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent"), cookie_jar=aiohttp.DummyCookieJar())

    @property
    def starts_processes(self) -> bool:
        return self._launch is not None

    @property
    def names(self) -> list[str]:
        """Replicas that are not leaving."""
        return [name for name, kept in self._kept.items() if not kept.is_leaving]

    def has(self, name: str) -> bool:
        """Whether there is a replica of that name; it may be leaving."""
        return name in self._kept

    def upstream(self, name: str) -> Upstream:
        """The replica of that name, which has reported."""
        upstream = self._kept[name].upstream
        assert upstream is not None
        return upstream

    @property
    def upstreams(self) -> list[Upstream]:
        """Replicas that answer."""
        return [kept.upstream for kept in self._kept.values() if kept.upstream is not None and kept.has_told]

    def url_of(self, name: str) -> str:
        upstream = self._kept[name].upstream
        return upstream.url if upstream is not None else ""

    def add(self, name: str, url: str = "") -> None:
        """Adds a replica; starts its process, or watches the one at `url`."""
        self._fleet.add(name)
        kept = self._kept[name] = _ReplicaPlace()
        run = self._watch_address(name, kept, url) if url else self._keep_running(name, kept)
        kept.task = asyncio.create_task(run)

    async def leave(self, name: str, timeout: float) -> None:
        """Drains a replica: it gets no more requests, has `timeout` seconds for those it has, and is removed."""
        kept = self._kept[name]
        kept.is_leaving = True
        self._fleet.drain(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._num_sent(name):
                    await asyncio.sleep(LOOK)
        await self._remove(name, kept)

    async def close(self, timeout: float) -> None:
        """Ends all replicas.  Args: timeout: seconds that their processes have to end by themselves."""
        await asyncio.gather(*[self._remove(name, kept, timeout) for name, kept in list(self._kept.items())])
        self._adapters.end()
        await self._session.close()

    def _num_sent(self, name: str) -> int:
        return next((one.num_sent for one in self._fleet.replicas if one.name == name), 0)

    async def _remove(self, name: str, kept: _ReplicaPlace, timeout: float = 5.0) -> None:
        if kept.task is not None:
            kept.task.cancel()
            await asyncio.wait([kept.task])
        if kept.upstream is not None:
            kept.upstream.lose()
        if kept.process is not None:
            await _ended(kept.process, timeout)
        self._fleet.remove(name)
        self._adapters.lost(name)
        del self._kept[name]

    # -- watching ------------------------------------------------------------------------------------------------

    async def _watch_address(self, name: str, kept: _ReplicaPlace, url: str) -> None:
        while True:
            kept.upstream = Upstream(name, url, self._session, self._headers)
            await self._until_lost(name, kept)

    async def _keep_running(self, name: str, kept: _ReplicaPlace) -> None:
        while True:
            began = asyncio.get_running_loop().time()
            trouble = await self._run_process(name, kept)
            if not trouble:
                kept.backoff.served(asyncio.get_running_loop().time() - began)
            else:
                self.trouble = trouble
                kept.backoff.failed()
                if kept.backoff.is_hopeless and not self._fleet.usable():
                    self.hopeless.set()
                self.changed.set()
            await asyncio.sleep(kept.backoff.pause)

    async def _run_process(self, name: str, kept: _ReplicaPlace) -> str:
        """Runs one process until it is lost.  Returns why it never served; "" if it did."""
        assert self._launch is not None
        try:
            kept.process = process = self._launch(name)
        except OSError as error:
            return f"replica {name} could not be started: {described(error)}"
        kept.upstream = Upstream(name, process.url, self._session, self._headers)
        has_served = await self._until_lost(name, kept)
        process.kill()
        return "" if has_served else f"replica {name} ended with status {process.status} before it was ready"

    async def _until_lost(self, name: str, kept: _ReplicaPlace) -> bool:
        """Watches a replica until it is lost.  Returns whether it has served."""
        upstream, loop = kept.upstream, asyncio.get_running_loop()
        assert upstream is not None
        polling = asyncio.create_task(self._poll(name, kept, upstream))
        began, why = loop.time(), ""
        try:
            while not why:
                await asyncio.sleep(LOOK)
                if kept.process is not None and kept.process.status is not None:
                    why = f"its process ended with status {kept.process.status}"
                elif kept.has_told and loop.time() - upstream.heard > SILENCE:
                    why = f"it has told nothing for {SILENCE:g} s"
                elif not kept.has_told and loop.time() - began > LOADING:
                    why = f"it was not ready after {LOADING:g} s"
            return kept.has_told
        finally:
            polling.cancel()
            if kept.has_told and why:
                logger.warning("replica %s is lost: %s", name, why)
                self._on_lost(name)
            upstream.lose()
            self._fleet.lost(name)
            self._adapters.lost(name)
            kept.has_told = False
            self.changed.set()

    async def _poll(self, name: str, kept: _ReplicaPlace, upstream: Upstream) -> None:
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                state = await upstream.poll()
            except ReplicaLost:  # it loads, or is about to be given up
                self._fleet.closed(name)
            else:
                kept.has_told = True
                self._fleet.update_cache(name, state.added, state.removed, is_whole=state.is_whole)
                adapters = self._adapters.on_report(upstream, asked)
                self._fleet.update(name, replace(state.report(), adapters=adapters), asked)
                if not state.accepts:
                    self._fleet.closed(name)
                self.changed.set()
            await asyncio.sleep(POLL)


async def _ended(process: ReplicaProcess, timeout: float) -> None:
    """Ends a process: by SIGTERM, and after `timeout` seconds by SIGKILL."""
    process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while process.status is None:
                await asyncio.sleep(LOOK)
    process.kill()


# -- replicas at addresses ---------------------------------------------------------------------------------------------


class Addresses:
    """Args: urls: each http://HOST:PORT, without a path."""

    def __init__(self, urls: Sequence[str], replicas: Replicas) -> None:
        self._urls, self._replicas = urls, replicas
        self._hosts: dict[str, list[str]] = {}  # by URL, when it could last be resolved
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
            for url in self._urls:
                if hosts := await resolved(url):
                    self._hosts[url] = hosts
            found = {_name(one): one for hosts in self._hosts.values() for one in hosts}
            for name, url in found.items():
                if not self._replicas.has(name):  # one that came back while it leaves is added once it has left
                    self._replicas.add(name, url)
            for name in self._replicas.names:
                if name not in found and self._hosts.keys() == set(self._urls):
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

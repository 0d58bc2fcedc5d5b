"""All replicas of a front door: their processes where it has started them, and whether they show signs of life.

    start ──► silent ──► up ──► lost ──► pause 0.5, 1 ... 30 s ──► start
              (loading)   └──► draining ──► idle ──► SIGTERM ──► removed

A replica is lost when its process ends, or when it has told nothing for `SILENCE` seconds; one that still loads may
take `LOADING`.  What waits for a lost one ends at once, and a new one takes its place.  Replicas at addresses, which
others start and stop, are only watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import aiohttp

from slotwise.engine.supervisor import Backoff
from slotwise.errors import described
from slotwise.routing.fleet import Fleet
from slotwise.scale.adapters import Adapters
from slotwise.scale.upstream import ReplicaLost, Upstream

POLL = 0.5  # seconds between two questions to a replica
LOOK = 0.1  # seconds between two looks at a process
SILENCE = 8.0  # seconds
LOADING = 900.0  # seconds that a process has to read its model
CONNECT = 5.0  # seconds
KEEP_ALIVE = 30.0  # seconds that idle connections are kept: less than a server keeps them

logger = logging.getLogger(__name__)


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
class _Kept:
    """A replica's place in the fleet, which several processes may fill one after the other."""

    upstream: Upstream | None = None
    process: ReplicaProcess | None = None
    has_told: bool = False
    is_leaving: bool = False
    task: asyncio.Task[None] | None = None
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.5, longest=30.0, recovered=20.0))


class Replicas:
    """Args:
        adapters: is told what replicas have, and that one is lost.
        launch: starts a replica's process, given its name; None: replicas are started by others.
        headers: of the door's own requests to replicas.
        on_lost: called with the name of each lost replica.
    """

    def __init__(self, fleet: Fleet, adapters: Adapters, launch: Callable[[str], ReplicaProcess] | None,
                 headers: Mapping[str, str], on_lost: Callable[[str], None]) -> None:
        self.hopeless = asyncio.Event()
        self.changed = asyncio.Event()  # set when a replica has come up or is gone
        self.trouble = ""  # why the last process ended that never served
        self._fleet, self._adapters = fleet, adapters
        self._launch, self._headers, self._on_lost = launch, headers, on_lost
        self._kept: dict[str, _Kept] = {}
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

    def upstream(self, name: str) -> Upstream:
        """The replica of that name, which has told of itself."""
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
        kept = self._kept[name] = _Kept()
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

    async def _remove(self, name: str, kept: _Kept, timeout: float = 5.0) -> None:
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

    async def _watch_address(self, name: str, kept: _Kept, url: str) -> None:
        while True:
            kept.upstream = Upstream(name, url, self._session, self._headers)
            await self._until_lost(name, kept)

    async def _keep_running(self, name: str, kept: _Kept) -> None:
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

    async def _run_process(self, name: str, kept: _Kept) -> str:
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

    async def _until_lost(self, name: str, kept: _Kept) -> bool:
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

    async def _poll(self, name: str, kept: _Kept, upstream: Upstream) -> None:
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                state = await upstream.poll()
            except ReplicaLost:  # it loads, or is about to be given up
                self._fleet.closed(name)
            else:
                kept.has_told = True
                self._fleet.cached(name, state.added, state.removed, is_whole=state.is_whole)
                self._fleet.told(name, replace(state.report(), adapters=self._adapters.told(upstream, asked)), asked)
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

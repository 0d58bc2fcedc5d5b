"""Keeps an engine behind the service: starts it, feels its pulse, buries it and starts the next.

    launch ─► attach ─► serving ─► lost ─► killed ─► pause ─┐
                 ▲                                          │      pause   1, 2, 4 ... 60 seconds, from the start
                 └──────────────── launch ◄─────────────────┘              again after a life that was long enough

An engine that does not become ready is a false start; after several in a row the service is told that it is hopeless.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from slotwise.engine.client import EngineClient, EngineError
from slotwise.engine.heartbeat import ENGINE_TIMEOUT, HEARTBEAT_SECONDS, Clock, HeartbeatMonitor
from slotwise.engine.messages import EngineInfo

EXIT = 3.0  # seconds that an engine process gets to end once its channel is closed
REAP = 10.0  # seconds that the kernel gets to take a killed one apart

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]
"""Seconds."""


class EngineProcess(Protocol):
    """An engine that was started; its end of the channel belongs to it."""

    channel: socket.socket  # ours

    @property
    def ended(self) -> bool: ...

    def kill(self) -> None:
        """End it as it stands, stopped or not."""
        ...


Launch = Callable[[EngineInfo | None], EngineProcess]


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start.  Units are seconds."""

    first: float = 1.0
    longest: float = 60.0
    recovered: float = 60.0  # an engine that served this long begins the count anew
    max_false_starts: int = 6  # in a row
    _failures: int = 0
    _false_starts: int = 0

    def served(self, seconds: float) -> None:
        """An engine was ready, and is gone after `seconds`."""
        self._false_starts = 0
        self._failures = 1 if seconds >= self.recovered else self._failures + 1

    def failed(self) -> None:
        """An engine did not become ready."""
        self._failures += 1
        self._false_starts += 1

    @property
    def is_hopeless(self) -> bool:
        return self._false_starts >= self.max_false_starts

    @property
    def pause(self) -> float:
        return min(self.longest, self.first * 2.0 ** min(self._failures - 1, 64))


class Supervisor:
    """The owner of engine processes, one at a time.

    Args:
        launch: starts one, in the place of the one described, if there was any; may raise OSError.
        timeout: seconds of silence after which an engine is killed.
        clock, sleep: time, in seconds.
    """

    def __init__(self, client: EngineClient, launch: Launch, timeout: float = ENGINE_TIMEOUT,
                 backoff: Backoff | None = None, clock: Clock = time.monotonic, sleep: Sleep = asyncio.sleep) -> None:
        self._client = client
        self._launch = launch
        self._timeout = timeout
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._sleep = sleep
        self._process: EngineProcess | None = None
        self._heartbeat: HeartbeatMonitor | None = None
        self._ready_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def launch(self) -> None:
        """Start the first engine process.  It loads while others do, too.

        Raises:
            OSError: there can be no process.
        """
        self._process = self._launch(None)

    async def ready(self) -> EngineInfo:
        """Wait until the first engine is ready; from then on there is always one, or one to come.

        Raises:
            EngineError: it could not start.
        """
        assert self._process is not None, "launch() first"
        self._spawn(self._watch_heartbeat())
        info = await self._attach(self._process)
        self._spawn(self._keep())
        return info

    async def end(self) -> None:
        """Let the engine go, kindly if it is alive; in bounded time in any case."""
        alive = self._client.healthy
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.give_up("the server is shutting down")
        if self._process is not None and not (alive and await self._ended(self._process, EXIT)):
            await self._bury()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_by_itself)

    def _ended_by_itself(self, task: asyncio.Task[None]) -> None:
        """A server that nobody watches over any more must not look as if it were."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the supervisor failed", exc_info=error)
            self._client.hopeless.set()

    async def _watch_heartbeat(self) -> None:
        """The pulse of whoever is attached, until the supervisor's end."""
        warned = False
        while True:
            await self._sleep(HEARTBEAT_SECONDS)
            heartbeat = self._heartbeat
            if heartbeat is None:
                continue
            heartbeat.tick()
            if heartbeat.verdict:
                self._heartbeat = None
                self._client.give_up(heartbeat.verdict)
            elif heartbeat.frozen and not warned:
                logger.warning("the engine shows no sign of life: unhealthy until it does, or is killed")
            warned = heartbeat.frozen

    async def _attach(self, process: EngineProcess) -> EngineInfo:
        self._heartbeat = HeartbeatMonitor(self._timeout, self._clock)
        try:
            info = await self._client.attach(process.channel, self._heartbeat)
        except EngineError:
            self._heartbeat = None
            raise
        self._ready_at = self._clock()
        return info

    async def _keep(self) -> None:
        """Start an engine whenever there is none, until nobody needs one or none can be had."""
        client, backoff = self._client, self._backoff
        while True:
            why = await client.lost()
            self._heartbeat = None
            if client.draining:
                return
            backoff.served(self._clock() - self._ready_at)
            logger.error("lost the engine: %s; the next starts in %g s", why, backoff.pause)
            while not await self._again():
                backoff.failed()
                if backoff.is_hopeless:
                    logger.error("no engine can be started any more: %s", client.failure)
                    client.hopeless.set()
                    return
                logger.error("the engine did not start: %s; the next starts in %g s", client.failure, backoff.pause)
            logger.info("the engine is ready again, with %d bytes of memory at most", client.info.memory.total)

    async def _again(self) -> bool:
        """Bury the last engine, pause, and start one; False when it did not become ready."""
        await self._bury()
        await self._sleep(self._backoff.pause)
        try:
            self._process = self._launch(self._client.info)
            await self._attach(self._process)
        except EngineError:
            return False
        except OSError as error:
            self._client.failure = f"no process could be started ({error})"
            return False
        return True

    async def _bury(self) -> None:
        """Nothing of an engine may be left when the next one asks for its memory."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.channel.close()
        process.kill()
        if not await self._ended(process, REAP):
            logger.error("an engine process was killed and is still there")

    async def _ended(self, process: EngineProcess, seconds: float) -> bool:
        """Wait for its end, up to `seconds`: whether it came."""
        step = 0.02
        for _ in range(int(seconds / step)):
            if process.ended:
                return True
            await self._sleep(step)
        return process.ended

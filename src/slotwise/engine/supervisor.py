"""Supervises the engine process of a service: starts it, monitors its heartbeats, and replaces it when it is lost.

    launch ─► attach ─► serving ─► lost ─► killed ─► pause ─┐
                 ▲                                          │      pause   1, 2, 4 ... 60 seconds, from the start
                 └──────────────── launch ◄─────────────────┘              again after an engine that served long enough

    rest ─► its process ends ─► wake ─► launch

An engine that does not become ready is a false start; after several in a row the supervisor gives up.  It gives up at
once if the next engine read another model than the first.
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

from slotwise.engine.client import EngineClient
from slotwise.engine.ipc import ENGINE_TIMEOUT, HEARTBEAT_SECONDS, Clock, HeartbeatMonitor
from slotwise.engine.messages import EngineInfo
from slotwise.engine.refusals import CheckpointChanged, EngineError
from slotwise.errors import described

EXIT = 3.0  # seconds that an engine process gets to exit once its channel is closed
REAP = 10.0  # seconds that the operating system gets to end a killed one

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]
"""Seconds."""


class EngineProcess(Protocol):
    """An engine process; it owns its end of the channel."""

    channel: socket.socket  # this process' end

    @property
    def ended(self) -> bool: ...

    @property
    def held_bytes(self) -> int: ...

    def kill(self) -> None:
        """Kills the process in any state, also when it is stopped."""
        ...


Launch = Callable[[EngineInfo | None], EngineProcess]


@dataclass(slots=True)
class Backoff:
    """Exponential backoff between starts.  Units are seconds."""

    first: float = 1.0
    longest: float = 60.0
    recovered: float = 60.0  # an engine that served this long resets the count
    max_false_starts: int = 6  # in a row
    _failures: int = 0
    _false_starts: int = 0

    def served(self, seconds: float) -> None:
        """An engine was lost after it served for `seconds`."""
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
    """Owns the engine processes, one at a time.

    Args:
        launch: starts one; receives the info of the one it replaces, if any; may raise OSError.
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
        self._replacing: asyncio.Task[None] | None = None

    @property
    def held_bytes(self) -> int:
        """Memory of the machine that the engine process holds."""
        return 0 if self._process is None else self._process.held_bytes

    def launch(self) -> None:
        """Starts the first engine process, which loads while the caller goes on.

        Raises:
            OSError: the process could not be started.
        """
        self._process = self._launch(None)

    async def ready(self) -> EngineInfo:
        """Waits until the first engine is ready; from then on a lost engine is replaced.

        Raises:
            EngineError: the engine could not start.
        """
        assert self._process is not None, "launch() first"
        self._spawn(self._watch_heartbeat())
        info = await self._attach(self._process)
        self._replacing = self._spawn(self._replace_lost())
        return info

    async def rest(self, why: str) -> None:
        """Ends the engine, in bounded time, until `wake`; its memory is free then.

        Args:
            why: the error of requests that are unfinished.
        """
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        alive, self._heartbeat = self._client.healthy, None
        self._client.give_up(why)
        if self._process is not None and not (alive and await self._ended(self._process, EXIT)):
            await self._kill_process()
        self._process = None

    async def wake(self) -> EngineInfo:
        """Starts the next engine after `rest`, and waits until it is ready; from then on a lost one is replaced.

        Raises:
            EngineError: it could not start; the supervisor still rests.
        """
        try:
            self._process = self._launch(self._client.info)
            info = await self._attach(self._process)
        except OSError as error:
            raise EngineError(f"no process could be started ({described(error)})") from error
        except EngineError:
            await self._kill_process()
            raise
        self._replacing = self._spawn(self._replace_lost())
        return info

    async def end(self) -> None:
        """Ends the engine in bounded time: by closing its channel if it is healthy, else by killing it."""
        alive = self._client.healthy
        tasks = self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None and not (alive and await self._ended(self._process, EXIT)):
            await self._kill_process()

    def kill(self) -> None:
        """Ends the engine and its supervision at once; every generation ends with an error."""
        if self._process is not None:
            self._process.kill()
        self._stop()

    def _stop(self) -> list[asyncio.Task[None]]:
        """Ends supervision and closes the channel.  Returns the tasks that are being cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        self._client.give_up("the engine is shutting down")
        return tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_by_itself)
        return task

    def _ended_by_itself(self, task: asyncio.Task[None]) -> None:
        """Declares the service hopeless when a supervising task failed: it would run without supervision."""
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, CheckpointChanged):
                logger.error("%s", error)
            else:
                logger.critical("the supervisor failed", exc_info=error)
            self._client.hopeless.set()

    async def _watch_heartbeat(self) -> None:
        """Monitors the heartbeats of the attached engine, until the supervisor ends."""
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
        heartbeat = self._heartbeat = HeartbeatMonitor(self._timeout, self._clock)
        try:
            info = await self._client.attach(process.channel, heartbeat)
        except EngineError:
            self._heartbeat = None
            raise
        heartbeat.ready()
        self._ready_at = self._clock()
        return info

    async def _replace_lost(self) -> None:
        """Replaces each lost engine, until the service drains or no engine can be started."""
        client, backoff = self._client, self._backoff
        while True:
            why = await client.lost()
            self._heartbeat = None
            if client.draining:
                return
            backoff.served(self._clock() - self._ready_at)
            logger.error("lost the engine: %s; the next starts in %g s", why, backoff.pause)
            while not await self._start_next():
                backoff.failed()
                if backoff.is_hopeless:
                    logger.error("no engine can be started any more: %s", client.failure)
                    client.hopeless.set()
                    return
                logger.error("the engine did not start: %s; the next starts in %g s", client.failure, backoff.pause)
            logger.info("the engine is ready again, with %d bytes of memory at most", client.info.memory.total)

    async def _start_next(self) -> bool:
        """Kills the last engine, pauses and starts the next; returns False if it did not become ready.

        Raises:
            CheckpointChanged: no further engine can be started.
        """
        await self._kill_process()
        await self._sleep(self._backoff.pause)
        try:
            self._process = self._launch(self._client.info)
            await self._attach(self._process)
        except CheckpointChanged:
            raise
        except EngineError:
            return False
        except OSError as error:
            self._client.failure = f"no process could be started ({described(error)})"
            return False
        return True

    async def _kill_process(self) -> None:
        """Kills the engine process and waits for its end: its memory must be free before the next one starts."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.channel.close()
        process.kill()
        if not await self._ended(process, REAP):
            logger.error("an engine process was killed and is still there")

    async def _ended(self, process: EngineProcess, seconds: float) -> bool:
        """Waits up to `seconds` for the process to end; returns whether it did."""
        step = 0.02
        for _ in range(int(seconds / step)):
            if process.ended:
                return True
            await self._sleep(step)
        return process.ended

"""Sleep: an engine gives memory back until it is woken up, while its client stays.

    level 1   the memory of the cache is the system's, and no cached prefix may be found again; weights stay
    level 2   the engine process has ended, and all of its memory is free; to wake up is to read the weights again

Requests that run may finish first, within a time; while the model sleeps new ones are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Protocol

from slotwise.engine.client import EngineClient
from slotwise.engine.messages import EngineInfo

LEVELS = (1, 2)
ASLEEP = "the model is asleep until it is woken up (POST /wake_up)"

logger = logging.getLogger(__name__)


class Engines(Protocol):
    """What owns the engine processes: `engine.supervisor.Supervisor`."""

    async def rest(self, why: str) -> None: ...

    async def wake(self) -> EngineInfo: ...

    @property
    def held_bytes(self) -> int: ...


class Busy(Exception):
    """Another change is in progress."""

    def __init__(self) -> None:
        super().__init__("another sleep, wake-up or exchange of the model is in progress")


class Sleep:
    """Whether the model sleeps, and how deeply; one change at a time."""

    def __init__(self, engine_client: EngineClient, engines: Engines) -> None:
        self._engine_client = engine_client
        self._engines = engines
        self._turn = asyncio.Lock()
        self.level = 0  # 0: awake
        # Times that the cache was lost while the engine went on: requests find no prefixes of an earlier generation.
        self.cache_generation = 0
        self._resets = Counter[str]()  # by tenant, added to `cache_generation`

    @property
    def held_bytes(self) -> int:
        """Memory of the machine that sleep at level 2 gives back."""
        return self._engines.held_bytes

    def generation_of(self, tenant: str) -> int:
        """Times that a tenant's cached prefixes were lost or reset while the engine went on."""
        return self.cache_generation + self._resets[tenant]

    def reset_cache(self, tenant: str | None) -> None:
        """Hides the prefixes cached in memory now from later requests of a tenant, or of all tenants."""
        if tenant is None:
            self.cache_generation += 1
        else:
            self._resets[tenant] += 1

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Makes one change.  Raises Busy."""
        if self._turn.locked():
            raise Busy
        async with self._turn:
            yield

    async def fall_asleep(self, level: int, timeout: float) -> None:
        """Sleeps at one of `LEVELS`; does nothing if it does already.

        Args:
            timeout: seconds that running requests have; then they are aborted.

        Raises:
            ValueError: there is no such level, this engine has none, or the model sleeps at a deeper one.
            EngineError: the engine keeps the memory, and goes on serving.
            Busy: another change is in progress.
        """
        if level not in LEVELS:
            raise ValueError(f"level: 1 or 2, not {level!r:.40}")
        async with self.changing():
            if level < self.level:
                raise ValueError(f"level: the model sleeps at level {self.level}; wake it up first")
            if level == 1 and not self._engine_client.info.gives_back:
                raise ValueError("level: 1 is for device cpu with one rank, whose cache can be given back alone; 2 "
                                 "ends the engine")
            if level > self.level:
                await self.rest(level, ASLEEP, timeout)

    async def rest(self, level: int, why: str, timeout: float) -> None:
        """As `fall_asleep`, within a change.  Args: why: the error of requests that come meanwhile."""
        client = self._engine_client
        await client.pause_for(why, timeout)
        try:
            if level == 1:
                self.cache_generation += 1
                await client.give_back()
            else:
                await self._engines.rest(why)
        except BaseException:
            client.pause = ""
            raise
        self.level = level
        logger.info("the model is asleep at level %d", level)

    def stay(self) -> None:
        """Tells requests that the model sleeps, whatever it was put to sleep for."""
        self._engine_client.pause = ASLEEP

    async def wake_up(self) -> None:
        """Serves again; does nothing if it is awake.

        Raises:
            EngineError: the engine did not start; the model stays asleep.
            Busy: another change is in progress.
        """
        async with self.changing():
            await self.return_to_work()

    async def return_to_work(self) -> None:
        """As `wake_up`, within a change."""
        if self.level == 2:
            await self._engines.wake()
        if self.level:
            logger.info("the model is awake")
        self.level, self._engine_client.pause = 0, ""

"""A bounded queue for one resource, in which clients take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class QueueFull(Exception):
    """As many are waiting as allowed; `of_one`: of this client."""

    def __init__(self, *, of_one: bool) -> None:
        super().__init__("too many wait")
        self.of_one = of_one


class Turns:
    """Grants one turn at a time, round-robin between holders and in order of arrival within one.

    Args:
        most: waiting in all.
        most_of_one: waiting of one holder: a key, or an address.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # none is empty; the first is next
        self._num = 0
        self._is_taken = False

    @property
    def num_waiting(self) -> int:
        return self._num

    def waiting_of(self, holder: str) -> int:
        return len(self._queues.get(holder, ()))

    @asynccontextmanager
    async def turn(self, holder: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it for the context.  Raises QueueFull."""
        if self._is_taken:
            await self._wait(holder)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, holder: str) -> None:
        if self.waiting_of(holder) >= self._most_of_one:
            raise QueueFull(of_one=True)
        if self._num >= self._most:
            raise QueueFull(of_one=False)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(holder, deque()).append(turn)
        self._num += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given the turn, but its task was cancelled
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Pass the turn to the next waiter; it stays taken meanwhile."""
        while self._queues:
            holder = next(iter(self._queues))
            queue = self._queues.pop(holder)
            turn = queue.popleft()
            self._num -= 1
            if queue:
                self._queues[holder] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False

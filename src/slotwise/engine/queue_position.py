"""Queries for the queue positions of requests, answered by the engine between two steps.

One query is in progress at a time, because its answer may have to visit the whole queue; a few more may wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slotwise.engine.messages import QueuePositionAnswer, QueuePositionQuery, RequestPosition
from slotwise.engine.refusals import TOO_MANY_QUERIES, Refused

MAX_WAITING = 64


class QueuePositionQueries:
    """The API process' side: matches answers to queries, and fails the pending query when the engine is lost."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._number = 0  # of the latest query
        self._answer: asyncio.Future[tuple[RequestPosition, ...]] | None = None  # to that one

    async def ask(
        self, request_ids: Sequence[int], send: Callable[[QueuePositionQuery], None],
    ) -> tuple[RequestPosition, ...]:
        """Returns the positions of those of these requests that are unfinished.

        Args:
            send: called when it is this query's turn; may raise.

        Raises:
            Refused: `MAX_WAITING` queries wait already.
            Exception: the one given to `give_up`.
        """
        if self._num_waiting >= MAX_WAITING:
            raise Refused(TOO_MANY_QUERIES, "too many ask where their requests are; try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                send(QueuePositionQuery(self._number + 1, tuple(request_ids)))
                self._number += 1
                self._answer = asyncio.get_running_loop().create_future()
                return await self._answer
        finally:
            self._num_waiting -= 1

    def answered(self, answer: QueuePositionAnswer) -> None:
        """Completes the pending query; ignores the answer to a cancelled one."""
        if answer.number == self._number and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer.positions)

    def give_up(self, why: Exception) -> None:
        """Fails the pending query with `why`."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)

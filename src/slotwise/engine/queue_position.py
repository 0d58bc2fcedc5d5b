"""Questions to the engine that change nothing: where requests stand.

One at a time, for the answer may have to walk through all who wait, between two steps; a few more may wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slotwise.engine.messages import QueuePositionAnswer, QueuePositionQuery, RequestPosition

MAX_WAITING = 64


class TooManyQueries(Exception):
    """More than may wait."""


class QueuePositionQueries:
    """The API process' side: each answer finds who asked, and nobody waits for an engine that is gone."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._number = 0  # of the latest question
        self._answer: asyncio.Future[tuple[RequestPosition, ...]] | None = None  # to that one

    async def ask(
        self, request_ids: Sequence[str], send: Callable[[QueuePositionQuery], None],
    ) -> tuple[RequestPosition, ...]:
        """Where those of these requests stand that live.

        Args:
            send: called when it is this question's turn; may raise.

        Raises:
            TooManyQuestions: too many ask.
            Exception: what `give_up` was told.
        """
        if self._num_waiting >= MAX_WAITING:
            raise TooManyQueries
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
        """Whoever asked may have gone meanwhile."""
        if answer.number == self._number and self._answer is not None and not self._answer.done():
            self._answer.set_result(answer.positions)

    def give_up(self, why: Exception) -> None:
        """There will be no answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)

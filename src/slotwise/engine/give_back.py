"""The API process' side of a `GiveBack`: waits for the answer, or for the loss of the engine."""

from __future__ import annotations

import asyncio

from slotwise.engine.messages import GivenBack


class GiveBackAnswer:
    """One answer at a time."""

    def __init__(self) -> None:
        self._objection: asyncio.Future[str] | None = None

    async def wait(self) -> str:
        """Waits for the next answer; returns why the memory was kept, or ""."""
        self._objection = asyncio.get_running_loop().create_future()
        return await self._objection

    def answered(self, answer: GivenBack) -> None:
        if self._objection is not None and not self._objection.done():
            self._objection.set_result(answer.objection)

    def give_up(self, why: Exception) -> None:
        """The engine is lost."""
        self.answered(GivenBack(str(why)))

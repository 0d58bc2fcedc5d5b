"""The adapters of an `AsyncLLM`, whose engine has a process of its own.  No torch here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slotwise.engine.client import EngineClient
from slotwise.engine.messages import EngineInfo
from slotwise.engine.observer import Observer
from slotwise.lora_request import LoRARequest
from slotwise.offline.residents import BASE, Held, Residents


class AsyncAdapters(Observer):
    """Loads the adapters of an engine in a process of its own, beside its steps.

    Args:
        num_places: adapters in memory at the same time; 0: there are none.
    """

    def __init__(self, client: EngineClient, num_places: int) -> None:
        self._client = client
        self._residents = Residents(num_places)
        self._loading = asyncio.Lock()

    def started(self, info: EngineInfo) -> None:
        """The next engine has no adapters yet."""
        self._residents.clear()

    @asynccontextmanager
    async def held(self, request: LoRARequest | None) -> AsyncIterator[Held]:
        """As that of `OfflineAdapters`, of one request.

        Raises:
            ValueError: as there, or it cannot be loaded.
            Refused: there is no engine.
        """
        if request is None:
            yield BASE
            return
        async with self._loading:
            number = self._residents.find(request) or await self._load(request)
        try:
            yield Held(number, request.lora_name)
        finally:
            self._residents.release(request, number)

    async def _load(self, request: LoRARequest) -> int:
        if evicted := self._residents.make_room(request):
            self._client.unload_adapter(evicted)
        number = self._residents.next_number()
        await self._client.load_adapter(number, os.path.abspath(request.lora_path))
        self._residents.add(request, number)
        return number

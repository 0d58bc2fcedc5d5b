"""`LoRARequest`, the adapters that offline requests name: which are in memory, and how each API loads them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slotwise.engine.executor import AdapterStore
from slotwise.engine.messages import EngineInfo, Observer

if TYPE_CHECKING:
    from slotwise.engine.client import EngineClient  # needs msgspec, which `LLM` does not


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, which is loaded with the first request that names it.

    Raises:
        ValueError: a field is not valid.
    """

    lora_name: str
    lora_int_id: int  # at least 1; another adapter, or other contents of its folder, have another
    lora_path: str  # a folder in the format of PEFT

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"lora_name must be a text, not {self.lora_name!r:.40}")
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be a whole number from 1 on, not {self.lora_int_id!r:.40}")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValueError(f"lora_path must be a folder, not {self.lora_path!r:.40}")


class HeldAdapter(NamedTuple):
    """An adapter that stays in memory."""

    number: int = 0  # the engine's
    name: str = ""


BASE = HeldAdapter()  # the base model


class ResidentAdapters:
    """The adapters in memory, the last used last, and how many calls use each.

    A number is never used again, so that no cached prefix of another adapter is found.

    Args:
        num_places: adapters in memory at the same time; 0: there are none.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._numbers: dict[LoRARequest, int] = {}
        self._uses: dict[LoRARequest, int] = {}
        self._next = itertools.count(1)

    def find(self, request: LoRARequest) -> int:
        """The number of an adapter in memory, which is used now; 0: it is not there.

        Raises:
            ValueError: adapters are not enabled, or this is not a LoRARequest.
        """
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a slotwise.LoRARequest, not {request!r:.40}")
        if not self._num_places:
            raise ValueError("lora_request needs adapters: start with enable_lora=True")
        for other in self._numbers:
            if other.lora_int_id == request.lora_int_id and other != request:
                raise ValueError(f"lora_int_id {request.lora_int_id} is that of {other.lora_name!r:.60}")
        number = self._numbers.pop(request, 0)
        if number:
            self._numbers[request] = number
            self._uses[request] += 1
        return number

    def make_room(self, request: LoRARequest) -> int:
        """Forgets the one that was not used for longest, and returns its number; 0: there is room.

        Raises:
            ValueError: all are in use.
        """
        if len(self._numbers) < self._num_places:
            return 0
        idle = next((each for each in self._numbers if not self._uses[each]), None)
        if idle is None:
            raise ValueError(f"{request.lora_name!r:.60} is one adapter more than max_cpu_loras {len(self._numbers)}, "
                             "and all of these are in use")
        del self._uses[idle]
        return self._numbers.pop(idle)

    def next_number(self) -> int:
        return next(self._next)

    def add(self, request: LoRARequest, number: int) -> None:
        """An adapter is loaded, and used."""
        self._numbers[request], self._uses[request] = number, 1

    def release(self, request: LoRARequest, number: int) -> None:
        if self._numbers.get(request) == number:
            self._uses[request] -= 1

    def clear(self) -> None:
        """No adapter is in memory."""
        self._numbers.clear()
        self._uses.clear()


class OfflineAdapters:
    """Loads the adapters of an engine in this process.

    Args:
        adapters: None where `enable_lora` is not set.
        lock: of the engine, so that no step runs while an adapter is loaded.
    """

    def __init__(self, adapters: AdapterStore | None, lock: AbstractContextManager[object]) -> None:
        self._adapters = adapters
        self._lock = lock
        self._residents = ResidentAdapters(0 if adapters is None else adapters.num_places)

    @contextmanager
    def held(self, requests: Sequence[LoRARequest | None]) -> Iterator[list[HeldAdapter]]:
        """The adapter of each request; within the context none of them is forgotten.

        Raises:
            ValueError: adapters are not enabled, more are in use than fit memory, or one of these is not a LoRARequest.
            CheckpointError: an adapter cannot be loaded.
        """
        taken: list[tuple[LoRARequest, int]] = []
        found: list[HeldAdapter] = []
        try:
            with self._lock:
                for request in requests:
                    number = 0
                    if request is not None:
                        number = self._residents.find(request) or self._load(request)
                        taken.append((request, number))
                    found.append(HeldAdapter(number, request.lora_name) if request is not None else BASE)
            yield found
        finally:
            with self._lock:
                for request, number in taken:
                    self._residents.release(request, number)

    def _load(self, request: LoRARequest) -> int:
        assert self._adapters is not None
        if evicted := self._residents.make_room(request):
            self._adapters.unload(evicted)
        number = self._residents.next_number()
        self._adapters.load(number, Path(request.lora_path))
        self._residents.add(request, number)
        return number


class AsyncAdapters(Observer):
    """Loads the adapters of an engine in a process of its own, during its steps.

    Args:
        num_places: adapters in memory at the same time; 0: there are none.
    """

    def __init__(self, client: EngineClient, num_places: int) -> None:
        self._client = client
        self._residents = ResidentAdapters(num_places)
        self._loading = asyncio.Lock()

    def started(self, info: EngineInfo) -> None:
        """The next engine has no adapters yet."""
        self._residents.clear()

    @asynccontextmanager
    async def held(self, request: LoRARequest | None) -> AsyncIterator[HeldAdapter]:
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
            yield HeldAdapter(number, request.lora_name)
        finally:
            self._residents.release(request, number)

    async def _load(self, request: LoRARequest) -> int:
        if evicted := self._residents.make_room(request):
            self._client.unload_adapter(evicted)
        number = self._residents.next_number()
        await self._client.load_adapter(number, os.path.abspath(request.lora_path))
        self._residents.add(request, number)
        return number

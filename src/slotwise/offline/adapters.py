"""The adapters that offline requests name: loaded with the first one, and forgotten when another needs the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from slotwise.engine.adapters import AdapterStore
from slotwise.lora_request import LoRARequest
from slotwise.offline.residents import BASE, Held, Residents


class OfflineAdapters:
    """Loads the adapters of an engine in this process.

    Args:
        adapters: None where `enable_lora` is not set.
        lock: of the engine, so that no step runs while an adapter is loaded.
    """

    def __init__(self, adapters: AdapterStore | None, lock: AbstractContextManager[object]) -> None:
        self._adapters = adapters
        self._lock = lock
        self._residents = Residents(0 if adapters is None else adapters.num_places)

    @contextmanager
    def held(self, requests: Sequence[LoRARequest | None]) -> Iterator[list[Held]]:
        """The adapter of each request; within the context none of them is forgotten.

        Raises:
            ValueError: adapters are not enabled, more are in use than fit memory, or this is no adapter's request.
            CheckpointError: an adapter cannot be loaded.
        """
        taken: list[tuple[LoRARequest, int]] = []
        found: list[Held] = []
        try:
            with self._lock:
                for request in requests:
                    number = 0
                    if request is not None:
                        number = self._residents.find(request) or self._load(request)
                        taken.append((request, number))
                    found.append(Held(number, request.lora_name) if request is not None else BASE)
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

"""The adapters that offline requests name: loaded with the first one, and forgotten when another needs the memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from slotwise.lora_request import LoRARequest
from slotwise.model.adapters import Adapters


class OfflineAdapters:
    """Numbers of adapters by request; a number is never used again, so that no cached prefix of another is found.

    Args:
        adapters: None where `enable_lora` is not set.
        lock: of the engine, so that no step runs while an adapter is loaded.
    """

    def __init__(self, adapters: Adapters | None, lock: AbstractContextManager[object]) -> None:
        self._adapters = adapters
        self._lock = lock
        self._numbers: dict[LoRARequest, int] = {}  # of those in memory, the last used last
        self._uses: dict[LoRARequest, int] = {}  # calls that run
        self._next = itertools.count(1)

    @contextmanager
    def held(self, requests: Sequence[LoRARequest | None]) -> Iterator[list[int]]:
        """The number of each request's adapter, 0 for none; within the context none of them is forgotten.

        Raises:
            ValueError: adapters are not enabled, more are in use than fit memory, or this is no adapter's request.
            CheckpointError: an adapter cannot be loaded.
        """
        held: list[LoRARequest] = []
        try:
            with self._lock:
                numbers = [0 if request is None else self._hold(request, held) for request in requests]
            yield numbers
        finally:
            with self._lock:
                for request in held:
                    self._uses[request] -= 1

    def _hold(self, request: LoRARequest, held: list[LoRARequest]) -> int:
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a slotwise.LoRARequest, not {request!r:.40}")
        if self._adapters is None:
            raise ValueError("lora_request needs adapters: start with LLM(enable_lora=True)")
        for other in self._numbers:
            if other.lora_int_id == request.lora_int_id and other != request:
                raise ValueError(f"lora_int_id {request.lora_int_id} is that of {other.lora_name!r:.60}")
        number = self._numbers.pop(request, 0) or self._load(request, self._adapters)
        self._numbers[request] = number
        self._uses[request] = self._uses.get(request, 0) + 1
        held.append(request)
        return number

    def _load(self, request: LoRARequest, adapters: Adapters) -> int:
        if adapters.is_full:
            idle = next((each for each in self._numbers if not self._uses.get(each)), None)
            if idle is None:
                raise ValueError(f"{request.lora_name!r:.60} is one adapter more than max_cpu_loras "
                                 f"{len(self._numbers)}, and all of these are in use")
            adapters.unload(self._numbers.pop(idle))
            del self._uses[idle]
        number = next(self._next)
        adapters.load(number, Path(request.lora_path))
        return number

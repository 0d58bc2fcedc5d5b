"""Which adapters that offline requests name are in memory, under which numbers, and which of them calls use."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from slotwise.lora_request import LoRARequest


class Held(NamedTuple):
    """An adapter that stays in memory."""

    number: int = 0  # the engine's
    name: str = ""


BASE = Held()  # the base model


class Residents:
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
            ValueError: adapters are not enabled, or this is no adapter's request.
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

"""The waiting room: requests in the order the policy gives them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from slotwise.core.request import Request
from slotwise.core.seams import Key


class WaitingQueue:
    """Sorted by `(key, arrival number)`; a request's key is fixed when it enters."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, Request]] = []
        self._places: dict[str, tuple[Key, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def first(self) -> Request:
        return self._entries[0][2]

    def add(self, request: Request, key: Key) -> None:
        self._places[request.request_id] = (key, request.arrival)
        insort(self._entries, (key, request.arrival, request))  # arrival numbers differ: requests are never compared

    def remove(self, request: Request) -> None:
        place = self._places.pop(request.request_id)
        del self._entries[bisect_left(self._entries, place, key=lambda entry: entry[:2])]

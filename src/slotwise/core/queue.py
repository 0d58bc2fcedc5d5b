"""The waiting room: requests in the order the policy gives them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from slotwise.core.request import Request, State
from slotwise.core.seams import Key


class WaitingQueue:
    """Sorted by `(key, arrival number)`; a request's key is fixed when it enters."""

    def __init__(self) -> None:
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; may name some who have left
        self._entries: list[tuple[Key, int, Request]] = []
        self._places: dict[str, tuple[Key, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def head(self, count: int) -> list[Request]:
        """The first `count`."""
        return [request for _, _, request in self._entries[:count]]

    @property
    def next_deadline(self) -> float:
        """Seconds; when somebody may have waited too long."""
        return self._deadlines[0][0] if self._deadlines else inf

    def expired(self, now: float) -> Iterator[Request]:
        """Those who still wait for their first slot past their deadline.  The caller removes them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heappop(self._deadlines)
            if request.state is State.WAITING and request.request_id in self._places:
                yield request

    def add(self, request: Request, key: Key) -> None:
        self._places[request.request_id] = (key, request.arrival)
        if request.deadline < inf and request.state is State.WAITING:
            heappush(self._deadlines, (request.deadline, request.arrival, request))
        insort(self._entries, (key, request.arrival, request))  # arrival numbers differ: requests are never compared

    def remove(self, request: Request) -> None:
        place = self._places.pop(request.request_id)
        del self._entries[bisect_left(self._entries, place, key=lambda entry: entry[:2])]

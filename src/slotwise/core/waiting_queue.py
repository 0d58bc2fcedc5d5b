"""Waiting queue: lanes of requests, each sorted by the policy's key; and of each lane, a sub-queue for every tier.

    lane "a"   ■ ■ ■ ■ ■        requests of a lane are sorted once, on insertion: by key, then by arrival number
    lane "b"   ■ ■              the order of lanes is computed again after every admission

Most policies need one lane.  A policy that shares between tenants uses a lane a tenant, so that a step changes one
number a tenant, and never the order of ten thousand waiting requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from slotwise.core.interfaces import Key
from slotwise.core.request import Request

SLACK = 64  # moments of requests that have left, which are dropped when they outnumber those of waiting ones

Entry = tuple[Key, int, Request]


class SubQueue(NamedTuple):
    """Names a part of the queue: requests of a group and lane, whose relative order is fixed by their keys."""

    group: str  # a tier; of requests that wait for another engine, a tenant
    lane: str  # from Policy.lane


class Place(NamedTuple):
    """The position of a request in the queue."""

    sub_queue: SubQueue
    key: Key
    arrival: int
    moment: float  # seconds; when the request is due


class WaitingQueue:
    """Sorted by `(lane_key(lane), key, arrival number)`; a request keeps its key until it is inserted again.

    Args:
        lane_key: Policy.lane_key: from a lane and the time, its sort key.
    """

    def __init__(self, lane_key: Callable[[str, float], Key]) -> None:
        self.lane_key = lane_key
        self._moments: list[tuple[float, int, Request]] = []  # a heap; holds some requests that have left
        self._sub_queues: dict[SubQueue, list[Entry]] = {}
        self._places: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests; the order between sub-queues is arbitrary."""
        return (request for entries in self._sub_queues.values() for _, _, request in entries)

    def walk(self, now: float) -> Walk:
        """Returns an iterator in queue order; the request shown last may be removed before the next call."""
        return Walk(self._sub_queues, self.lane_key, now)

    def positions(self, request_ids: Collection[int], now: float) -> dict[int, int]:
        """Returns how many requests are before each of `request_ids` that waits."""
        left = {name for name in request_ids if name in self._places}
        found: dict[int, int] = {}
        walk, num_before = self.walk(now), 0
        while left and (request := walk.next()) is not None:
            num_before += 1
            if request.request_id in left:
                left.remove(request.request_id)
                found[request.request_id] = num_before - 1
        return found

    @property
    def next_moment(self) -> float:
        """When the next request is due, in seconds; infinite: none."""
        return self._moments[0][0] if self._moments else inf

    def due(self, now: float) -> Iterator[Request]:
        """Yields the requests due by `now`, each once.  The caller removes or re-inserts them."""
        before: Request | None = None  # one that left and came back with the same moment has two equal entries
        while self._moments and self._moments[0][0] <= now:
            entry = heappop(self._moments)
            if self._is_current(*entry) and entry[2] is not before:
                before = entry[2]
                yield before

    def add(self, request: Request, sub_queue: SubQueue, key: Key, moment: float = inf) -> None:
        """Insert a request by its key.  At `moment`, in seconds, it is `due`."""
        self._places[request.request_id] = Place(sub_queue, key, request.arrival, moment)
        if moment < inf:
            heappush(self._moments, (moment, request.arrival, request))
        entries = self._sub_queues.setdefault(sub_queue, [])
        insort(entries, (key, request.arrival, request))  # no two arrivals are the same

    def remove(self, request: Request) -> None:
        sub_queue, key, arrival, _ = self._places.pop(request.request_id)
        entries = self._sub_queues[sub_queue]
        del entries[bisect_left(entries, (key, arrival), key=lambda entry: entry[:2])]
        if not entries:
            del self._sub_queues[sub_queue]
        if len(self._moments) > 2 * len(self._places) + SLACK:
            self._moments = [entry for entry in self._moments if self._is_current(*entry)]
            heapify(self._moments)

    def _is_current(self, moment: float, arrival: int, request: Request) -> bool:
        """Whether a request is still in the queue as it was when the moment was noted."""
        place = self._places.get(request.request_id)
        return place is not None and (place.arrival, place.moment) == (arrival, moment)


class Walk:
    """Iterates over a queue from its head; requests shown may be removed on the way."""

    def __init__(
        self, sub_queues: dict[SubQueue, list[Entry]], lane_key: Callable[[str, float], Key], now: float,
    ) -> None:
        self._sub_queues = sub_queues
        self._lane_key = lane_key
        self._now = now
        self._shown: Request | None = None
        self._at = dict.fromkeys(sub_queues, 0)  # by sub-queue: requests shown and not removed
        self._heads = [self._head(sub_queue) for sub_queue in sub_queues]  # a heap
        heapify(self._heads)

    def _head(self, sub_queue: SubQueue) -> tuple[Key, Key, int, SubQueue]:
        key, arrival, _ = self._sub_queues[sub_queue][self._at[sub_queue]]
        return self._lane_key(sub_queue.lane, self._now), key, arrival, sub_queue

    def next(self) -> Request | None:
        """Returns the next request; None: all were shown."""
        if self._shown is not None:
            self._step_past(self._shown)
        while self._heads and (head := self._head(self._heads[0][3])) != self._heads[0]:
            heapreplace(self._heads, head)  # an admission from another group's part of this lane changed the key
        if not self._heads:
            self._shown = None
            return None
        sub_queue = self._heads[0][3]
        self._shown = self._sub_queues[sub_queue][self._at[sub_queue]][2]
        return self._shown

    def _step_past(self, shown: Request) -> None:
        sub_queue = self._heads[0][3]
        entries = self._sub_queues.get(sub_queue, ())
        at = self._at[sub_queue]
        if at < len(entries) and entries[at][2] is shown:
            self._at[sub_queue] = at = at + 1
        if at < len(entries):
            heapreplace(self._heads, self._head(sub_queue))
        else:
            heappop(self._heads)

    def close(self, group: str) -> None:
        """Skip all further requests of `group`."""
        self._shown = None
        self._heads = [head for head in self._heads if head[3].group != group]
        heapify(self._heads)

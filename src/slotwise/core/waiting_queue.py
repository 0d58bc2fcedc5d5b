"""The waiting room: lanes of requests, each in the order the policy gives it.

    lane "a"   ■ ■ ■ ■ ■        a lane's requests are sorted once, when they come: by key, then by arrival
    lane "b"   ■ ■              which lane is next is asked again whenever somebody was taken from one

Most policies need one lane.  One that shares between tenants gives each a lane of its own, so that what changes at
every step is a number for each tenant, and never the order of ten thousand who wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from slotwise.core.interfaces import Key
from slotwise.core.request import Request

Entry = tuple[Key, int, Request]


class Lane(NamedTuple):
    """Requests that keep the order of their keys among each other."""

    tier: str
    name: str  # the policy's


class Place(NamedTuple):
    """Where a request stands."""

    lane: Lane
    key: Key
    arrival: int
    moment: float  # seconds; when it is due


class WaitingQueue:
    """Sorted by `(lane, key, arrival number)`; a request's key holds until it is put in again.

    Args:
        lane_key: of a lane's name, now: the policy's order of lanes.
    """

    def __init__(self, lane_key: Callable[[str, float], Key]) -> None:
        self.lane_key = lane_key
        self._moments: list[tuple[float, int, Request]] = []  # a heap; may name some who have left
        self._lanes: dict[Lane, list[Entry]] = {}
        self._places: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        """Everyone, in no order that means anything between lanes."""
        return (request for entries in self._lanes.values() for _, _, request in entries)

    def walk(self, now: float) -> Walk:
        """Who is next, one after the other; whoever was shown may be taken out before the next is asked for."""
        return Walk(self._lanes, self.lane_key, now)

    @property
    def next_moment(self) -> float:
        """Seconds; when somebody may have waited too long."""
        return self._moments[0][0] if self._moments else inf

    def due(self, now: float) -> Iterator[Request]:
        """Those whose moment has come.  The caller takes them out, or puts them in again."""
        while self._moments and self._moments[0][0] <= now:
            moment, arrival, request = heappop(self._moments)
            place = self._places.get(request.request_id)
            if place is not None and (place.arrival, place.moment) == (arrival, moment):
                yield request

    def add(self, request: Request, lane: Lane, key: Key, moment: float = inf) -> None:
        """Let in at its place.  At `moment`, in seconds, it is `due`."""
        self._places[request.request_id] = Place(lane, key, request.arrival, moment)
        if moment < inf:
            heappush(self._moments, (moment, request.arrival, request))
        insort(self._lanes.setdefault(lane, []), (key, request.arrival, request))  # no two arrivals are the same

    def remove(self, request: Request) -> None:
        lane, key, arrival, _ = self._places.pop(request.request_id)
        entries = self._lanes[lane]
        del entries[bisect_left(entries, (key, arrival), key=lambda entry: entry[:2])]
        if not entries:
            del self._lanes[lane]


class Walk:
    """Steps through a queue from its head, whatever is taken out of it on the way."""

    def __init__(self, lanes: dict[Lane, list[Entry]], lane_key: Callable[[str, float], Key], now: float) -> None:
        self._lanes = lanes
        self._lane_key = lane_key
        self._now = now
        self._shown: Request | None = None
        self._at = dict.fromkeys(lanes, 0)  # of each lane, how many were shown and left where they were
        self._heads = [self._head(lane) for lane in lanes]  # a heap
        heapify(self._heads)

    def _head(self, lane: Lane) -> tuple[Key, Key, int, Lane]:
        key, arrival, _ = self._lanes[lane][self._at[lane]]
        return self._lane_key(lane.name, self._now), key, arrival, lane

    def next(self) -> Request | None:
        """Who is next; None: everyone was shown."""
        if self._shown is not None:
            self._step_past(self._shown)
        while self._heads and (head := self._head(self._heads[0][3])) != self._heads[0]:
            heapreplace(self._heads, head)  # somebody was admitted from another tier's lane of the same name
        if not self._heads:
            self._shown = None
            return None
        lane = self._heads[0][3]
        self._shown = self._lanes[lane][self._at[lane]][2]
        return self._shown

    def _step_past(self, shown: Request) -> None:
        lane = self._heads[0][3]
        entries = self._lanes.get(lane, ())
        at = self._at[lane]
        if at < len(entries) and entries[at][2] is shown:
            self._at[lane] = at = at + 1
        if at < len(entries):
            heapreplace(self._heads, self._head(lane))
        else:
            heappop(self._heads)

    def close_tier(self, tier: str) -> None:
        """Show nobody else of a tier."""
        self._shown = None
        self._heads = [head for head in self._heads if head[3].tier != tier]
        heapify(self._heads)

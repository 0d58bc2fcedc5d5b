"""Holds the latest lines of a log in bounded memory, and the state that a new reader needs before them.

An entry is encoded once, for the file and all readers.  As bytes it takes a fraction of the memory, and the memory of
its objects is reused at once: if entries were kept as objects, each new one would start in memory that has not been in
a processor cache for minutes.

Lines have positions, counted from the first line ever.  Each reader holds its own position, and the ring never waits
for it: a slow reader gets the number of lines it missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import msgspec

from slotwise.observe.event_log import Command, Engine, Entry, Request, Run, Step, line_of
from slotwise.observe.index import Index
from slotwise.observe.request_timeline import RequestTimeline

CAPACITY = 5 << 20  # bytes; about 2,000 steps of 64 rows, as many as a page shows smoothly


class Line(NamedTuple):
    """An encoded entry, with the part of it that later readers need."""

    data: bytes
    kind: type[Entry]
    told: Entry | None


class Batch(NamedTuple):
    lines: list[Line]
    missed: int  # lines dropped between the reader's position and the first of these
    position: int  # of the next read


class Extract(NamedTuple):
    """The input of explanations: timelines, and the lines of steps, commands and lost engines, concatenated."""

    facts: list[RequestTimeline]
    positions: list[int]  # of the lines
    lines: bytes


class Known:
    """The state needed to read the entries that follow: the run with its current settings, and unfinished requests."""

    def __init__(self, run: Run | None = None, requests: Mapping[int, Request] | None = None) -> None:
        self._run = run
        self._requests = dict(requests or {})

    def feed(self, entry: Entry) -> None:
        if isinstance(entry, Step):
            for end in entry.ended:
                self._requests.pop(end.number, None)
            if entry.configured is not None and self._run is not None:
                self._run = msgspec.structs.replace(self._run, scheduling=entry.configured)
        elif isinstance(entry, Request):
            self._requests[entry.number] = entry
        elif isinstance(entry, Run):
            self._run = entry

    def copy(self) -> Known:
        return Known(self._run, self._requests)

    def entries(self) -> list[Entry]:
        return [*([self._run] if self._run is not None else []), *self._requests.values()]


def _told(entry: Entry) -> Entry | None:
    """Returns the part of an entry that `Known` uses: none of most steps, and never their columns."""
    if isinstance(entry, Request | Run):
        return entry
    if isinstance(entry, Step) and (entry.ended or entry.configured is not None):
        return Step(entry.step, entry.started_ns, entry.ended_ns, ended=entry.ended, configured=entry.configured)
    return None


class Ring:
    """Holds at most `capacity` bytes of lines, or a single line."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lines: deque[Line] = deque()
        self._size = 0  # bytes
        self._end = 0  # position behind the last
        self._before = Known()
        self._index = Index()

    @property
    def end(self) -> int:
        """The position of the next line."""
        return self._end

    @property
    def first(self) -> int:
        """The position of the oldest line held."""
        return self._end - len(self._lines)

    def append(self, entry: Entry, data: bytes) -> None:
        """Appends an entry, whose line is `data`, and drops the oldest lines beyond the capacity."""
        self._lines.append(Line(data, type(entry), _told(entry)))
        self._index.feed(self._end, entry)
        self._size += len(data)
        self._end += 1
        while self._size > self._capacity and len(self._lines) > 1:
            gone = self._lines.popleft()
            self._size -= len(gone.data)
            if gone.told is not None:
                self._before.feed(gone.told)
                self._index.forget(gone.told)

    def preface(self) -> list[Entry]:
        """Returns the entries needed before the first line held."""
        return self._before.entries()

    def living(self) -> list[Entry]:
        """Returns the entries needed before the next line."""
        known = self._before.copy()
        for line in self._lines:
            if line.told is not None:
                known.feed(line.told)
        return known.entries()

    def named(self, tenant: str, name: str, most: int) -> list[RequestTimeline]:
        """Returns the latest requests of this name all of whose lines are held, in order of arrival.

        Args:
            tenant: owner of the requests; "": all tenants.
        """
        return self._index.latest(takewhile(self._is_whole, self._index.named(tenant, name)), most)

    def numbered(self, numbers: Iterable[int], most: int) -> list[RequestTimeline]:
        """Returns the requests with these numbers, likewise."""
        found = [facts for facts in self._index.numbered(numbers) if self._is_whole(facts)]
        return self._index.latest(reversed(found), most)

    def _is_whole(self, facts: RequestTimeline) -> bool:
        """True if all lines after the request's own are held."""
        return facts.position + 1 >= self.first

    def extract(self, found: Sequence[RequestTimeline]) -> Extract:
        """Returns the lines that concern the requests found."""
        positions: list[int] = []
        lines: list[bytes] = []
        end = self.first
        for facts in sorted(found, key=lambda facts: facts.position):
            start = max(end, facts.position + 1)
            end = max(end, facts.over_at + 1 if facts.over_at >= 0 else self._end)
            for position, line in zip(range(start, end), self._between(start, end), strict=True):
                if line.kind in (Step, Command, Engine):
                    positions.append(position)
                    lines.append(line.data)
        return Extract(list(found), positions, b"".join(lines))

    def _between(self, start: int, end: int) -> list[Line]:
        """Returns the lines from position `start` to before `end`, read from the nearer end."""
        first = self.first
        if start - first < self._end - end:
            return list(islice(self._lines, start - first, end - first))
        return list(islice(reversed(self._lines), self._end - end, self._end - start))[::-1]

    def lines(self) -> list[bytes]:
        """Returns all lines held, after their preface."""
        return [*map(line_of, self.preface()), *(line.data for line in self._lines)]

    def since(self, position: int, most: int) -> Batch:
        """Returns up to `most` lines from `position` on, as far as they are still held."""
        first = max(position, self.first)
        latest = list(islice(reversed(self._lines), self._end - first))
        latest.reverse()
        lines = latest[:most]
        return Batch(lines, first - position, first + len(lines))

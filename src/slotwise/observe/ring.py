"""Holds the latest lines of a log in bounded memory, and the timelines that a new reader needs before them.

An entry is encoded once, for the file and all readers.  As bytes it takes a fraction of the memory, and the memory of
its objects is reused at once: if entries were kept as objects, each new one would start in memory that has not been in
a processor cache for minutes.

What is bounded is the memory that lines take, and not their bytes alone: most of a short line is its objects', and a
request's timeline takes several times as much as its line.

Lines have positions, counted from the first line ever.  Each reader holds its own position, and the ring never waits
for it: a slow reader gets the number of lines it missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

import msgspec

from slotwise.core.record import StepRecord
from slotwise.observe.event_log import CommandEntry, EngineLost, Entry, RequestEntry, Run, line_of
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.index import Index
from slotwise.observe.request_timeline import RequestTimeline

CAPACITY = 24 << 20  # bytes; about ten minutes of steps of eight rows that take 10 ms each
OVERHEAD = 104  # bytes of a line's objects, beside those of its text
TIMELINE = 4  # bytes of a request's timeline and its places in the index, for each byte of its line

PIECE = 500  # lines; read and sent within a small part of a step


class Overtaken(Exception):
    """Lines have left the ring before they were read."""


class Line(NamedTuple):
    """An encoded entry, and its kind."""

    data: bytes
    kind: type[Entry]

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes, about."""
        return OVERHEAD + len(self.data) * (1 + TIMELINE * (self.kind is RequestEntry))


class Batch(NamedTuple):
    lines: list[Line]
    missed: int  # lines dropped between the reader's position and the first of these
    position: int  # of the next read


class Extract(NamedTuple):
    """The input of explanations: timelines, and the lines of steps, commands and lost engines, concatenated."""

    timelines: list[RequestTimeline]
    positions: list[int]  # of the lines
    lines: bytes


class Ring:
    """Holds lines that take at most `capacity` bytes of memory, or a single one."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lines: deque[Line] = deque()
        self._size = 0  # bytes of memory
        self._end = 0  # position behind the last
        self._runs: deque[tuple[int, Run]] = deque()  # the run in force from a position on, with its settings
        self._index = Index()

    @property
    def timelines(self) -> Timelines:
        """The timelines of the requests whose lines are held, and of unfinished ones."""
        return self._index.timelines

    @property
    def end(self) -> int:
        """The position of the next line."""
        return self._end

    @property
    def first(self) -> int:
        """The position of the oldest line held."""
        return self._end - len(self._lines)

    def append(self, entry: Entry, data: bytes) -> Changes:
        """Appends an entry, whose line is `data`, and drops the oldest lines beyond the capacity."""
        changes = self._index.apply(entry)
        if isinstance(entry, Run):
            self._runs.append((self._end, entry))
        elif isinstance(entry, StepRecord) and entry.inputs.configured is not None and self._runs:
            run = msgspec.structs.replace(self._runs[-1][1], scheduling=entry.inputs.configured)
            self._runs.append((self._end, run))
        self._lines.append(line := Line(data, type(entry)))
        self._size += line.cost
        self._end += 1
        if self._size > self._capacity and len(self._lines) > 1:
            self._shrink()
        return changes

    def _shrink(self) -> None:
        while self._size > self._capacity and len(self._lines) > 1:
            self._size -= self._lines.popleft().cost
        self._index.drop_before(self.first)
        while len(self._runs) > 1 and self._runs[1][0] < self.first:
            self._runs.popleft()

    def preface(self, position: int) -> list[Entry]:
        """Returns the entries needed before the line at `position`, which is held: the run, and unfinished requests."""
        return self._known_at(position, self._index.unended_before(position))

    def latest(self, most: int) -> int:
        """Returns the position of the first of the latest lines, which take about `most` bytes here."""
        share = min(1.0, most / self._size) if self._size else 1.0
        return self._end - round(share * len(self._lines))

    @property
    def size(self) -> int:
        """Bytes of memory that the lines held take, about."""
        return self._size

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival held to the last."""
        arrivals = [one.request.ns for one in self.timelines.by_number.values() if self._is_whole(one)]
        return (max(arrivals) - min(arrivals)) * 1e-9 if arrivals else 0.0

    def unfinished(self) -> list[Entry]:
        """Returns the entries needed before the next line: the run, and the unfinished requests."""
        unfinished = [one.request for one in self.timelines.by_number.values() if one.over_at < 0]
        return self._known_at(self._end, unfinished)

    def _known_at(self, position: int, requests: Sequence[RequestEntry]) -> list[Entry]:
        runs = [run for at, run in self._runs if at < position]
        return [*runs[-1:], *requests]

    def named(self, tenant: str, name: str, most: int) -> list[RequestTimeline]:
        """Returns the latest requests of this name all of whose lines are held, in order of arrival.

        Args:
            tenant: owner of the requests; "": all tenants.
        """
        return self._index.latest(takewhile(self._is_whole, self._index.named(tenant, name)), most)

    def numbered(self, numbers: Iterable[int], most: int) -> list[RequestTimeline]:
        """Returns the requests with these numbers, likewise."""
        found = [one for one in self._index.numbered(numbers) if self._is_whole(one)]
        return self._index.latest(reversed(found), most)

    def _is_whole(self, one: RequestTimeline) -> bool:
        """True if all lines after the request's own are held."""
        return one.position + 1 >= self.first

    def extract(self, found: Sequence[RequestTimeline]) -> Extract:
        """Returns the lines that concern the requests found."""
        positions: list[int] = []
        lines: list[bytes] = []
        end = self.first
        for one in sorted(found, key=lambda one: one.position):
            start = max(end, one.position + 1)
            end = max(end, one.over_at + 1 if one.over_at >= 0 else self._end)
            for position, line in zip(range(start, end), self._between(start, end), strict=True):
                if line.kind in (StepRecord, CommandEntry, EngineLost):
                    positions.append(position)
                    lines.append(line.data)
        return Extract(list(found), positions, b"".join(lines))

    def _between(self, start: int, end: int) -> list[Line]:
        """Returns the lines from position `start` to before `end`, read from the nearer end."""
        first = self.first
        if start - first < self._end - end:
            return list(islice(self._lines, start - first, end - first))
        return list(islice(reversed(self._lines), self._end - end, self._end - start))[::-1]

    def pieces(self, most: int | None = None) -> Iterator[bytes]:
        """Yields the lines held, after their preface, in pieces; lines may be appended between two of them.

        Args:
            most: bytes, about, of the latest lines; None: all.

        Raises:
            Overtaken: so many were appended that some had to go before they were read.
        """
        position, end = self.first if most is None else self.latest(most), self._end
        yield b"".join(map(line_of, self.preface(position)))
        while position < end:
            batch = self.since(position, min(PIECE, end - position))
            if batch.missed:
                raise Overtaken("the latest lines of the log changed faster than they could be read")
            yield b"".join([line.data for line in batch.lines])
            position = batch.position

    def lines(self) -> list[bytes]:
        """Returns all lines held, after their preface."""
        return b"".join(self.pieces()).splitlines(keepends=True)

    def since(self, position: int, most: int) -> Batch:
        """Returns up to `most` lines from `position` on, as far as they are still held."""
        first = max(position, self.first)
        lines = self._between(first, min(first + most, self._end))
        return Batch(lines, first - position, first + len(lines))

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
from slotwise.observe.request_timeline import SHAPES, LastEnds, RequestTimeline

CAPACITY = 24 << 20  # bytes; about ten minutes of steps of eight rows that take 10 ms each
OVERHEAD = 104  # bytes of a line's objects, in addition to those of its text
TIMELINE = 4  # bytes of a request's timeline and its places in the index, for each byte of its line

PIECE = 500  # lines; read and sent within a small part of a step


# Finds the requests in a ring by name, and the lines that concern each.
#
#     name ──► numbers ──► timelines: position of the request's line, position of the step that ended it
#
# Updated as lines are appended and dropped: a few dictionary entries per request, none per step.

Name = tuple[str, str]  # a tenant, or "" for all, and the id of a response


class Index:
    """Requests by number and by name.  Their salts identify tenants (see `RequestTimeline.belongs_to`)."""

    def __init__(self) -> None:
        self.timelines = Timelines()
        self._named: dict[Name, dict[int, None]] = {}  # numbers, in order of arrival
        self._together: dict[tuple[int, str], dict[int, RequestTimeline]] = {}  # choices of a response
        self._over: deque[tuple[int, int]] = deque()  # position of the step that ended a request, its number

    def apply(self, entry: Entry) -> Changes:
        """Adds an appended line."""
        changes = self.timelines.apply(entry)
        if isinstance(entry, RequestEntry) and (timeline := self.timelines.get(entry.number)) is not None:
            for name in _names(timeline):
                self._named.setdefault(name, {})[entry.number] = None
            self._together.setdefault((timeline.received_ns, timeline.response_id), {})[entry.number] = timeline
        for timeline, end in changes.ended:
            self._over.append((timeline.over_at, end.request_id))
        for timeline in changes.forgotten:
            self._remove(timeline)
        return changes

    def drop_before(self, position: int) -> None:
        """Drops the requests that ended before this position."""
        while self._over and self._over[0][0] < position:
            if (timeline := self.timelines.drop(self._over.popleft()[1])) is not None:
                self._remove(timeline)

    def unended_before(self, position: int) -> list[RequestEntry]:
        """Returns the requests that had arrived and not ended there."""
        return [one.request for one in self.timelines.by_number.values()
                if one.position < position and not 0 <= one.over_at < position]

    def named(self, tenant: str, name: str) -> Iterator[RequestTimeline]:
        """Yields a tenant's requests ("": all tenants') of this name, the latest first."""
        ids = dict.fromkeys([name, name.rpartition("-")[0], *[shape + name for shape in SHAPES]])
        numbers = [self._named[tenant, one] for one in ids if (tenant, one) in self._named]
        ordered: Iterable[int] = reversed(numbers[0]) if len(numbers) == 1 else sorted(
            [number for some in numbers for number in some], reverse=True)
        return (one for one in self.numbered(ordered) if one.is_named(name) and one.belongs_to(tenant))

    def numbered(self, numbers: Iterable[int]) -> Iterator[RequestTimeline]:
        """Yields the requests of `numbers` that are in the index, in their order."""
        known = self.timelines.by_number
        for number in numbers:
            if (timeline := known.get(number)) is not None:
                yield timeline

    def latest(self, found: Iterable[RequestTimeline], most: int) -> list[RequestTimeline]:
        """Returns the first `most` of those found, in order of arrival, with `siblings_ended_ns` set."""
        chosen = sorted(islice(found, most), key=lambda one: one.request.number)
        for one in chosen:
            one.meet(LastEnds.of(self._together[one.received_ns, one.response_id].values()))
        return chosen

    def _remove(self, timeline: RequestTimeline) -> None:
        number = timeline.request.number
        for name in _names(timeline):
            del self._named[name][number]
            if not self._named[name]:
                del self._named[name]
        key = (timeline.received_ns, timeline.response_id)
        del self._together[key][number]
        if not self._together[key]:
            del self._together[key]


def _names(timeline: RequestTimeline) -> list[Name]:
    tenant = timeline.request.spec.salt.partition(":")[0]
    return [("", timeline.response_id), *([(tenant, timeline.response_id)] if tenant else [])]


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

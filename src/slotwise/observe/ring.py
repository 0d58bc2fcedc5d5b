"""The latest entries of a log, decoded, in bounded memory; and what a newcomer must know before them.

Entries have positions, counted from the first that ever came.  Each reader keeps its own and is never waited for: one
that is too slow finds that entries are gone, and how many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from slotwise.observe.log import Entry, Request, Run, Step

CAPACITY = 150_000  # about 2,000 steps of 64 rows, as many as a page shows smoothly; some 25 MB
STEP, OTHER = 8, 4  # what an entry weighs, in rows


class Batch(NamedTuple):
    entries: list[Entry]
    missed: int  # entries gone between the reader's position and the first of these
    position: int  # to read on from


class Known:
    """What must be known in order to understand the entries behind it: the run as it stands, and who lives."""

    def __init__(self, run: Run | None = None, requests: Mapping[int, Request] | None = None) -> None:
        self._run = run
        self._requests = dict(requests or {})

    def take(self, entry: Entry) -> None:
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


class Ring:
    """Holds what weighs at most `capacity` rows together, or a single entry."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._entries: deque[Entry] = deque()
        self._weight = 0
        self._end = 0  # position behind the last
        self._before = Known()

    @property
    def end(self) -> int:
        """The position of the entry that comes next."""
        return self._end

    @property
    def first(self) -> int:
        """The position of the oldest entry held."""
        return self._end - len(self._entries)

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._weight += weight(entry)
        self._end += 1
        while self._weight > self._capacity and len(self._entries) > 1:
            gone = self._entries.popleft()
            self._weight -= weight(gone)
            self._before.take(gone)

    def preface(self) -> list[Entry]:
        """What to know in order to understand the first entry held."""
        return self._before.entries()

    def living(self) -> list[Entry]:
        """What to know in order to understand the entry that comes next."""
        known = self._before.copy()
        for entry in self._entries:
            known.take(entry)
        return known.entries()

    def entries(self) -> list[Entry]:
        """All there is, with its preface."""
        return [*self.preface(), *self._entries]

    def since(self, position: int, most: int) -> Batch:
        """Up to `most` entries from `position` on, as far as they are still there."""
        first = max(position, self.first)
        latest = list(islice(reversed(self._entries), self._end - first))
        latest.reverse()
        entries = latest[:most]
        return Batch(entries, first - position, first + len(entries))


def weight(entry: Entry) -> int:
    """Roughly what an entry takes, in rows of a step."""
    if isinstance(entry, Step):
        drained = sum(map(len, entry.tokens)) if entry.sampled else 0  # a batch that returns as one tells all at once
        return STEP + len(entry.counts) + len(entry.refused) + drained
    if isinstance(entry, Request):
        params = entry.params
        return OTHER + len(params.logit_bias) + len(params.stop_token_ids) + len(params.stop)
    return OTHER

"""Finds the requests in a ring by name, and the lines that concern each.

    name ──► numbers ──► timelines: position of the request's line, position of the step that ended it

Updated as lines are appended and dropped: a few dictionary entries per request, none per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from slotwise.observe.event_log import Entry, RequestEntry
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.request_timeline import SHAPES, LastEnds, RequestTimeline

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

"""Finds the requests in a ring by name, and the lines that concern each.

    name ──► numbers ──► timelines: position of the request's line, position of the step that ended it

Updated as lines are appended and dropped: a few dictionary entries per request, none per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from slotwise.observe.event_log import Entry, Request, Step
from slotwise.observe.request_timeline import SHAPES, Gathering, RequestTimeline

Name = tuple[str, str]  # a tenant, or "" for all, and the id of a response


class Index:
    """Requests by number and by name.  Their salts identify tenants (see `RequestTimeline.belongs_to`)."""

    def __init__(self) -> None:
        self._gathering = Gathering()
        self._named: dict[Name, dict[int, None]] = {}  # numbers, in order of arrival
        self._together: dict[tuple[int, str], dict[int, RequestTimeline]] = {}  # choices of a response

    def feed(self, position: int, entry: Entry) -> None:
        """Adds an appended line."""
        self._gathering.feed(position, entry)
        if isinstance(entry, Request) and (facts := self._gathering.of(entry.number)) is not None:
            for name in _names(facts):
                self._named.setdefault(name, {})[entry.number] = None
            self._together.setdefault((facts.received_ns, facts.response_id), {})[entry.number] = facts

    def forget(self, entry: Entry) -> None:
        """Removes a dropped line: a request is removed with the step that ended it."""
        if isinstance(entry, Step):
            for end in entry.ended:
                if (facts := self._gathering.drop(end.number)) is not None:
                    self._remove(facts)

    def named(self, tenant: str, name: str) -> Iterator[RequestTimeline]:
        """Yields a tenant's requests ("": all tenants') of this name, the latest first."""
        ids = dict.fromkeys([name, name.rpartition("-")[0], *[shape + name for shape in SHAPES]])
        numbers = [self._named[tenant, one] for one in ids if (tenant, one) in self._named]
        ordered: Iterable[int] = reversed(numbers[0]) if len(numbers) == 1 else sorted(
            [number for some in numbers for number in some], reverse=True)
        for number in ordered:
            facts = self._gathering.of(number)
            if facts is not None and facts.is_named(name) and facts.belongs_to(tenant):
                yield facts

    def numbered(self, numbers: Iterable[int]) -> Iterator[RequestTimeline]:
        """Yields the requests of `numbers` that are in the index, in their order."""
        for number in numbers:
            if (facts := self._gathering.of(number)) is not None:
                yield facts

    def latest(self, found: Iterable[RequestTimeline], most: int) -> list[RequestTimeline]:
        """Returns the first `most` of those found, in order of arrival, with `siblings_ended_ns` set."""
        chosen = sorted(islice(found, most), key=lambda facts: facts.request.number)
        for facts in chosen:
            facts.meet(self._together[facts.received_ns, facts.response_id].values())
        return chosen

    def _remove(self, facts: RequestTimeline) -> None:
        number = facts.request.number
        for name in _names(facts):
            del self._named[name][number]
            if not self._named[name]:
                del self._named[name]
        key = (facts.received_ns, facts.response_id)
        del self._together[key][number]
        if not self._together[key]:
            del self._together[key]


def _names(facts: RequestTimeline) -> list[Name]:
    tenant = facts.request.salt.partition(":")[0]
    return [("", facts.response_id), *([(tenant, facts.response_id)] if tenant else [])]

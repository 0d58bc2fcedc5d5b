"""Finds the requests that a ring's lines tell of by their names, and which lines tell of each.

    name ──► numbers ──► facts: position of the request's line, position of the step that ended it

Kept as lines come and go: a few dictionary entries for each request, none for a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from slotwise.observe.event_log import Entry, Request, Step
from slotwise.observe.request_timeline import SHAPES, Gathering, RequestTimeline

Name = tuple[str, str]  # a tenant, or "" for all, and the id of a response


class Index:
    """Requests by number and by name.  Tenants are told apart by their salts (see `RequestTimeline.belongs_to`)."""

    def __init__(self) -> None:
        self._gathering = Gathering()
        self._named: dict[Name, dict[int, None]] = {}  # numbers, in order of arrival
        self._together: dict[tuple[int, str], dict[int, RequestTimeline]] = {}  # choices of a response

    def take(self, position: int, entry: Entry) -> None:
        """A line that was appended."""
        self._gathering.take(position, entry)
        if isinstance(entry, Request) and (facts := self._gathering.of(entry.number)) is not None:
            for name in _names(facts):
                self._named.setdefault(name, {})[entry.number] = None
            self._together.setdefault((facts.received_ns, facts.response_id), {})[entry.number] = facts

    def forget(self, entry: Entry) -> None:
        """A line that is gone: with the step that ended it a request is gone."""
        if isinstance(entry, Step):
            for end in entry.ended:
                if (facts := self._gathering.drop(end.number)) is not None:
                    self._remove(facts)

    def named(self, tenant: str, name: str) -> Iterator[RequestTimeline]:
        """The requests of a tenant ("": of all) that have this name, the latest first."""
        ids = dict.fromkeys([name, name.rpartition("-")[0], *[shape + name for shape in SHAPES]])
        numbers = [self._named[tenant, one] for one in ids if (tenant, one) in self._named]
        ordered: Iterable[int] = reversed(numbers[0]) if len(numbers) == 1 else sorted(
            [number for some in numbers for number in some], reverse=True)
        for number in ordered:
            facts = self._gathering.of(number)
            if facts is not None and facts.is_named(name) and facts.belongs_to(tenant):
                yield facts

    def numbered(self, numbers: Iterable[int]) -> Iterator[RequestTimeline]:
        """Those of `numbers` that are known, in their order."""
        for number in numbers:
            if (facts := self._gathering.of(number)) is not None:
                yield facts

    def latest(self, found: Iterable[RequestTimeline], most: int) -> list[RequestTimeline]:
        """The first `most` of those found, in order of arrival, with what their responses' choices tell."""
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

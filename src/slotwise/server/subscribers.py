"""Subscribers of the event log: a bounded number, each of which sees only what its tenant may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import msgspec

from slotwise.core.params import SamplingParams
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add
from slotwise.observe import event_log
from slotwise.observe.ring import Line
from slotwise.server.errors import ApiError

MAX_SUBSCRIBERS = 16
MAX_OF_ONE = 4  # subscribers with one key, or from one address where there are no keys


class Subscribers:
    """Counts subscribers, in all and by holder: a key, or an address where there are no keys."""

    def __init__(self) -> None:
        self._holders: Counter[str] = Counter()

    @contextmanager
    def entering(self, holder: str) -> Iterator[None]:
        """Raises ApiError when the bound is reached, in all or for this holder."""
        if self._holders[holder] >= MAX_OF_ONE:
            message = f"{MAX_OF_ONE} viewers of this client watch the events already"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_viewers")
        if (num := self._holders.total()) >= MAX_SUBSCRIBERS:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{num} viewers watch the events already",
                           code="too_many_viewers")
        self._holders[holder] += 1
        try:
            yield
        finally:
            self._holders[holder] -= 1
            if not self._holders[holder]:
                del self._holders[holder]


class TenantFilter:
    """Shows other tenants' requests with lengths and slots, but without names and tokens.

    Args:
        tenant: the subscriber's.  Empty where all are one; only the salts are hidden then.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._own: set[int] = set()  # numbers of its unfinished requests

    def line(self, line: Line) -> bytes:
        """A line of the log as the subscriber may see it."""
        if line.kind is event_log.RequestEntry or (line.kind is event_log.Step and self._tenant):
            return event_log.line_of(self.before(event_log.decode(line.data)))
        return line.data

    def before(self, entry: event_log.Entry) -> event_log.Entry:
        """`entry` as the subscriber may see it.  Entries must come in the order of the log."""
        if isinstance(entry, event_log.RequestEntry):
            return self._request(entry)
        if isinstance(entry, event_log.Step) and self._tenant:
            return self._step(entry)
        return entry

    def _request(self, entry: event_log.RequestEntry) -> event_log.RequestEntry:
        spec = entry.spec
        if not self._tenant or spec.salt.partition(":")[0] == self._tenant:
            self._own.add(entry.number)
            return entry.replace_spec(spec.public()) if spec.salt or spec.slo.tenant else entry
        hidden = RequestSpec((), SamplingParams(max_tokens=spec.params.max_tokens))
        return event_log.RequestEntry(entry.number, entry.ns, entry.num_prompt,
                                      Add("", hidden, entry.timing))

    def _step(self, entry: event_log.Step) -> event_log.Step:
        own = self._own
        seen = msgspec.structs.replace(
            entry, tokens=self._covered(entry, entry.tokens), sampled=self._covered(entry, entry.sampled))
        if entry.ended:
            seen.ended = tuple([end if end.number in own else end._replace(message="") for end in entry.ended])
            own.difference_update([end.number for end in entry.ended])
        return seen

    def _covered(self, entry: event_log.Step, tokens: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        own = self._own
        return tuple([row if number in own else (0,) * len(row)
                      for number, row in zip(entry.numbers, tokens, strict=False)])

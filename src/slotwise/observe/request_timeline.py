"""The history of each request, gathered from a log in one pass: arrival, handling by the engine, end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import NO_STEP, Command, Engine, Entry, Gap, Request, Run, Sent, Step

SHAPES = ("cmpl-", "chatcmpl-")  # prefixes of response ids


class RequestTimeline(msgspec.Struct):
    """The history of a request.  Times are monotonic nanoseconds; 0: not yet, or unknown."""

    request: Request
    position: int  # of its entry in the log
    scheduling: Scheduling | None  # at its arrival
    taken_ns: int = 0  # handled by the engine
    left_ns: int = 0  # its client disconnected, or it was aborted
    ended_ns: int = 0
    end_reason: str = ""
    num_output: int = 0
    last_byte_ns: int = 0
    siblings_ended_ns: int = 0  # end of the last of the other choices of its response
    over_at: int = -1  # position of the last entry about it except `Sent`; -1: not ended yet

    def meet(self, together: Iterable[RequestTimeline]) -> None:
        """Records the end of the other choices of its response."""
        others = [other.left_ns or other.ended_ns for other in together if other is not self]
        self.siblings_ended_ns = max(others, default=0)

    @property
    def received_ns(self) -> int:
        return self.request.received_ns or self.request.ns

    @property
    def tokenised_ns(self) -> int:
        return self.request.tokenised_ns or self.request.ns

    @property
    def ended(self) -> bool:
        return bool(self.end_reason)

    @property
    def end_ns(self) -> int:
        """End of all work for the request; 0 before."""
        return max(self.last_byte_ns, self.left_ns) or self.ended_ns

    @property
    def total_ns(self) -> int:
        """Time from its arrival to `end_ns`; 0 before."""
        return self.end_ns - self.received_ns if self.end_ns else 0

    @property
    def response_id(self) -> str:
        """The engine's id without its serial number."""
        return self.request.id.rpartition("-")[0] or self.request.id

    def is_named(self, name: str) -> bool:
        """True if `name` is the engine's id, the response's, or the client's `X-Request-Id`."""
        return name in (self.request.id, self.response_id) or self.response_id in [shape + name for shape in SHAPES]

    def belongs_to(self, tenant: str) -> bool:
        """True if the request's salt begins with `tenant`, or `tenant` is empty."""
        return not tenant or self.request.salt == tenant or self.request.salt.startswith(tenant + ":")


def gather(entries: Iterable[Entry]) -> dict[int, RequestTimeline]:
    """Returns the timelines of a log by request number, in order of arrival; omits requests with missing steps."""
    builder = Gathering()
    for position, entry in enumerate(entries):
        builder.feed(position, entry)
    return builder.finished()


class Gathering:
    """Builds the timelines by request number, entry by entry."""

    def __init__(self) -> None:
        self._timelines: dict[int, RequestTimeline] = {}
        self._scheduling: Scheduling | None = None
        self._sent: deque[tuple[int, int]] = deque()  # commands not yet handled: time, arriving request (-1: none)
        self._starts_anew = True  # the next step is the first one available

    def feed(self, position: int, entry: Entry) -> None:
        match entry:
            case Step():
                self._step(position, entry)
            case Request():
                self._timelines[entry.number] = RequestTimeline(entry, position, self._scheduling)
                self._sent.append((entry.ns, entry.number))
            case Command():
                self._command(entry)
            case Sent():
                if timeline := self._timelines.get(entry.number):
                    timeline.last_byte_ns = entry.last_ns
            case Run():
                self._scheduling, self._starts_anew = entry.scheduling, True
            case Engine():  # lost
                self._sent.clear()
                for timeline in self._living():
                    timeline.end_reason, timeline.ended_ns = "error", entry.ns
            case Gap():
                self._forget(self._living())

    def of(self, number: int) -> RequestTimeline | None:
        return self._timelines.get(number)

    def drop(self, number: int) -> RequestTimeline | None:
        """Removes and returns the timeline of a request."""
        return self._timelines.pop(number, None)

    def finished(self) -> dict[int, RequestTimeline]:
        choices: dict[tuple[int, str], list[RequestTimeline]] = {}
        for timeline in self._timelines.values():
            choices.setdefault((timeline.received_ns, timeline.response_id), []).append(timeline)
        for together in choices.values():
            for timeline in together:
                timeline.meet(together)
        return self._timelines

    def _living(self) -> list[RequestTimeline]:
        return [timeline for timeline in self._timelines.values() if not timeline.ended]

    def _forget(self, those: Iterable[RequestTimeline]) -> None:
        """Drops requests some of whose steps are missing."""
        for timeline in those:
            del self._timelines[timeline.request.number]
        self._sent.clear()

    def _step(self, position: int, entry: Step) -> None:
        if self._starts_anew and entry.step != NO_STEP:
            self._starts_anew = False
            if entry.step > 0:  # the ring has dropped its beginning
                began = entry.started_ns
                self._forget([timeline for timeline in self._living() if timeline.request.ns < began])
        for ns in entry.taken:
            if self._sent and self._sent[0][0] <= ns:  # else it was sent before the first entry
                _, number = self._sent.popleft()
                if timeline := self._timelines.get(number):
                    timeline.taken_ns = ns
        if entry.configured is not None:
            self._scheduling = entry.configured
        for end in entry.ended:
            timeline = self._timelines.get(end.number)
            if timeline is not None:
                timeline.num_output, timeline.over_at = end.num_output, position
                if not timeline.ended:
                    timeline.end_reason, timeline.ended_ns = end.reason, entry.ended_ns

    def _command(self, entry: Command) -> None:
        self._sent.append((entry.ns, -1))
        timeline = self._timelines.get(entry.number)
        if entry.reason and timeline is not None and not timeline.ended:
            timeline.end_reason, timeline.ended_ns = entry.reason, entry.ns
            if entry.reason != "stop":
                timeline.left_ns = entry.ns

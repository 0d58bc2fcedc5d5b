"""The requests that wait for a slot: why, and how long for each reason.

All requests behind the first one that was not admitted wait for the same reason.  One counter per reason; a request's
wait is the counter's increase while it waited.  So a plan costs time for the requests whose reason is another one, and
none for the rest of the queue.

Each waiting request is in exactly one of three dicts: `_unplanned` until a plan made after its arrival gives it a
reason, then `_behind` if that is the plan's common one, else `_exceptions`.  A request that has left may stay in
`_exceptions` until the next plan.
"""

from __future__ import annotations

from slotwise.core.record import StepRecord
from slotwise.observe.request_timeline import RequestTimeline


class Waiting:
    """Attributes the waiting of each request to the reasons that the plans give."""

    def __init__(self) -> None:
        self._waited: dict[str, int] = {}  # nanoseconds attributed, by reason, of all requests
        self._planned_ns = 0  # of the last plan
        self._stopped: dict[str, int] = {}  # the counters: nanoseconds for which admission stopped, by reason
        self._stop = ""  # the reason for which it stopped
        self._requests: dict[int, RequestTimeline] = {}
        self._unplanned: dict[int, RequestTimeline] = {}  # those in no plan since they began to wait
        self._behind: dict[int, dict[str, int]] = {}  # those that wait for `_stop`: the counters when they began to
        self._exceptions: dict[int, str] = {}  # the reasons of those that wait for another one

    def clear(self) -> None:
        """Removes all requests, as of the last plan."""
        self._waited = self.waited_ns()
        for requests in (self._requests, self._unplanned, self._behind, self._exceptions):
            requests.clear()

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def reason(self, timeline: RequestTimeline) -> str:
        return self._stop if timeline.request.number in self._behind else timeline.reason

    def by_reason(self) -> dict[str, int]:
        """Returns the number of requests that the last plan left waiting, by reason."""
        waiting = {self._stop: len(self._behind)} if self._behind else {}
        for number, reason in self._exceptions.items():
            if number in self._requests:
                waiting[reason] = waiting.get(reason, 0) + 1
        return waiting

    def waited_ns(self) -> dict[str, int]:
        """Returns the nanoseconds that requests waited, by reason, up to the last plan."""
        waited = dict(self._waited)
        for number in {**self._unplanned, **self._exceptions}:
            if (timeline := self._requests.get(number)) is not None:
                more = max(0, self._planned_ns - timeline.attributed_ns)
                waited[timeline.reason] = waited.get(timeline.reason, 0) + more
        return waited

    def add(self, timeline: RequestTimeline) -> None:
        number = timeline.request.number
        self._requests[number] = self._unplanned[number] = timeline

    def remove(self, number: int, now_ns: int) -> RequestTimeline | None:
        """Removes and returns a request that waited until `now_ns`; None if it does not wait."""
        timeline = self._requests.pop(number, None)
        if timeline is not None:
            self._attribute(timeline, now_ns)
        return timeline

    def pass_time(self, now_ns: int) -> None:
        """Attributes the time up to a plan to the reason of the plan before, for those behind."""
        if (ns := now_ns - self._planned_ns) > 0:
            self._planned_ns = now_ns
            if self._behind:
                self._stopped[self._stop] = self._stopped.get(self._stop, 0) + ns
                self._waited[self._stop] = self._waited.get(self._stop, 0) + ns * len(self._behind)

    def decide(self, step: StepRecord) -> None:
        """Applies the reasons of a plan: a request that was not examined waits for the reason at which it stopped."""
        if step.plan.stop is None:
            return
        stop = step.plan.stop.reason
        exceptions = {number: reason for number, reason in step.plan.refused
                      if reason != stop and number in self._requests}
        changed = {**self._exceptions, **exceptions, **self._unplanned}
        self._stop, self._exceptions = stop, exceptions
        for number in changed:
            timeline = self._requests.get(number)
            if timeline is None or not 0 < timeline.taken_ns <= step.started_ns:
                continue  # it is not in this plan
            self._attribute(timeline, step.started_ns)
            timeline.reason = exceptions.get(number, stop)
            if timeline.attributed_ns > step.started_ns:  # it had a row in the step in flight
                exceptions[number] = timeline.reason
            elif number not in exceptions:
                self._behind[number] = dict(self._stopped)

    def _attribute(self, timeline: RequestTimeline, now_ns: int) -> None:
        """Attributes the waiting of a request up to `now_ns`, and counts no more for it."""
        number, waited = timeline.request.number, timeline.stages[-1].waited
        self._unplanned.pop(number, None)
        if (began := self._behind.pop(number, None)) is not None:
            for reason, ns in self._stopped.items():
                if passed := ns - began.get(reason, 0):
                    waited[reason] = waited.get(reason, 0) + passed
            timeline.reason, timeline.attributed_ns = self._stop, self._planned_ns
        if (ns := now_ns - timeline.attributed_ns) > 0:
            waited[timeline.reason] = waited.get(timeline.reason, 0) + ns
            self._waited[timeline.reason] = self._waited.get(timeline.reason, 0) + ns
            timeline.attributed_ns = now_ns

"""Folds the entries of an event log into the timelines of its requests: the one place that interprets entries.

Explanations, traces, live state and metrics read the timelines, and the `Changes` that an entry made.

A step takes time for the requests it changes, and hardly any for the others.  A *stream* is a row with one token in
each step: steps are counted for all streams together, and a stream's tokens are those counted since it began.  So
`num_published`, `last_token_ns`, `slot` and `computed` of a stream's timeline lag behind; they are brought up to date
before any read.  Timelines leave this module only through `by_number` and `get`, which do so, or at an event that has
ended the stream: an admission, a first token, a preemption, a stall, an end.  A timeline that is kept over an `apply`
is stale.

Memory is bounded by the requests that have not been dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import msgspec

from slotwise.core.record import NO_STEP, RequestEnd, StepRecord
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import CommandEntry, EngineLost, Entry, Gap, RequestEntry, Run, Sent
from slotwise.observe.request_timeline import DECODE, QUEUE, TOKENIZING, LastEnds, RequestTimeline, Stage

# The requests that wait for a slot: why, and how long for each reason.
#
# All requests behind the first one that was not admitted wait for the same reason.  One counter per reason; a
# request's wait is the counter's increase while it waited.  So a plan costs time for the requests whose reason is
# another one, and none for the rest of the queue.
#
# Each waiting request is in exactly one of three dicts: `_unplanned` until a plan made after its arrival gives it a
# reason, then `_behind` if that is the plan's common one, else `_exceptions`.  A request that has left may stay in
# `_exceptions` until the next plan.

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


class Changes(msgspec.Struct, gc=False):
    """What an entry changed."""

    admitted: Sequence[tuple[RequestTimeline, int]] = ()  # with the tokens known of it then
    first_tokens: Sequence[RequestTimeline] = ()
    ended: Sequence[tuple[RequestTimeline, RequestEnd]] = ()  # by the engine
    forgotten: Sequence[RequestTimeline] = ()  # dropped, for their steps are missing
    gaps: Mapping[int, int] = {}  # rows with a token, by the nanoseconds since their token before
    num_tokens: int = 0  # published


class Timelines:
    """The timelines of a log by request number, in order of arrival."""

    def __init__(self) -> None:
        self.run: Run | None = None  # the latest
        self.scheduling: Scheduling | None = None  # in force
        self.waiting = Waiting()
        self.num_running = self.num_waiting = self.num_free_blocks = 0  # by the engine
        self.stalled: list[RequestTimeline] = []  # running, without a row in the last plan
        self._timelines: dict[int, RequestTimeline] = {}
        self._position = 0  # of the next entry
        self._starts_anew = True  # the next step is the first one available
        self._begin()

    def _begin(self) -> None:
        """No request is with the engine."""
        self.waiting.clear()
        self.num_running = self.num_waiting = 0
        self.stalled = []
        self._sent: deque[tuple[int, int]] = deque()  # commands not yet handled: time, arriving request (-1: none)
        self._unseated: set[int] = set()  # those that arrived before the first step available, without a row since
        self._starting: dict[int, RequestTimeline] = {}  # admitted, without a token since
        self._last: StepRecord | None = None  # with rows
        self._streams: dict[int, int] = {}  # rows of it with one token: `_num_streamed` before the first of these
        self._num_streamed = 0  # steps with rows
        self._streamed_ns = 0  # end of the last one

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def by_number(self) -> Mapping[int, RequestTimeline]:
        """All timelines, up to date."""
        for number in list(self._streams):
            self._interrupt(number)
        if self._last is not None:
            self._place(self._last.plan.request_ids)
        return self._timelines

    def get(self, number: int) -> RequestTimeline | None:
        """Returns one timeline, up to date."""
        self._interrupt(number)
        if self._last is not None and number in self._last.plan.request_ids:
            self._place([number])
        return self._timelines.get(number)

    def reason(self, timeline: RequestTimeline) -> str:
        """Why a request waits, or has no row; empty if it has one."""
        return self.waiting.reason(timeline)

    @property
    def usage(self) -> float:
        """Share of cache blocks held by requests."""
        return 1 - self.num_free_blocks / self.run.limits.num_blocks if self.run is not None else 0.0

    def drop(self, number: int) -> RequestTimeline | None:
        """Removes and returns the timeline of a request that has ended."""
        return self._timelines.pop(number, None)

    def clear(self) -> None:
        """Drops all timelines."""
        self._timelines.clear()
        self._begin()

    # -- folding -------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> Changes:
        """Applies the next entry of the log."""
        if isinstance(entry, StepRecord):
            changes = self.plan(entry)
            self.result(entry, changes)
            self._position += 1
            return changes
        changes = Changes()
        if isinstance(entry, RequestEntry):
            self._arrive(entry)
        elif isinstance(entry, CommandEntry):
            self._sent.append((entry.ns, -1))
            if entry.reason and (timeline := self._timelines.get(entry.number)) is not None:
                timeline.command(entry.reason, entry.ns)
        elif isinstance(entry, Sent):
            if (timeline := self._timelines.get(entry.number)) is not None:
                timeline.send(entry.last_ns)
        elif isinstance(entry, Run):
            self.run, self.scheduling, self._starts_anew = entry, entry.scheduling, True
            changes.forgotten = self._forget()
            self.num_free_blocks = entry.limits.num_blocks
        elif isinstance(entry, EngineLost):
            self._lose(entry.ns)
        elif isinstance(entry, Gap):
            changes.forgotten = self._forget()
        self._position += 1
        return changes

    def _arrive(self, request: RequestEntry) -> None:
        timeline = RequestTimeline(
            request, self._position, self.scheduling, self.run.started_ns if self.run is not None else 0,
            attributed_ns=request.ns)
        if request.timing.received_ns:
            timeline.stages.append(Stage(TOKENIZING, request.timing.received_ns, request.ns))
        timeline.stages.append(Stage(QUEUE, request.ns))
        self._timelines[request.number] = timeline
        self.waiting.add(timeline)
        self._sent.append((request.ns, request.number))

    def _unended(self) -> list[RequestTimeline]:
        return [timeline for timeline in self.by_number.values() if not timeline.ended]

    def _lose(self, now_ns: int) -> None:
        """The engine is lost, with its requests."""
        for timeline in self._unended():
            timeline.end_reason, timeline.ended_ns = "error", now_ns
        self._begin()
        self.num_free_blocks = self.run.limits.num_blocks if self.run is not None else 0

    def _forget(self) -> list[RequestTimeline]:
        """Drops the requests some of whose steps are missing."""
        forgotten = self._unended()
        for timeline in forgotten:
            del self._timelines[timeline.request.number]
        self._begin()
        return forgotten

    # -- a plan --------------------------------------------------------------------------------------------------

    def plan(self, step: StepRecord) -> Changes:
        """Applies the decisions of a step's plan, and what the engine handled before; `result` applies the rest."""
        changes = Changes()
        if self._starts_anew and step.step != NO_STEP:
            self._starts_anew = False
            if step.step > 0:
                self._join(step.started_ns)
        for ns in step.inputs.handled:
            self._take(ns)
        self.waiting.pass_time(step.started_ns)
        if step.preempted or step.admitted:
            self._move(step, changes)
        if step.step != NO_STEP:
            self._stall(step)
            self.waiting.decide(step)
        return changes

    def _join(self, began_ns: int) -> None:
        """The log's first steps are missing, and so are those of the requests that came before."""
        for timeline in self._unended():
            if timeline.request.ns < began_ns:
                timeline.is_whole, timeline.taken_ns = False, timeline.request.ns
                self._unseated.add(timeline.request.number)
        self._sent = deque(sent for sent in self._sent if sent[0] >= began_ns)

    def _take(self, ns: int) -> None:
        """The engine handled a command at `ns`, in the order sent."""
        if self._sent and self._sent[0][0] <= ns:  # else it was sent before the first entry
            _, number = self._sent.popleft()
            if (timeline := self._timelines.get(number)) is not None:
                timeline.taken_ns = ns

    def _move(self, step: StepRecord, changes: Changes) -> None:
        for number, reason, lost in step.preempted:
            timeline = self.get(number)
            if timeline is not None and timeline.over_at < 0:  # else it ended in the step in flight
                timeline.preempt(reason, lost, step.started_ns)
                self._starting.pop(number, None)
                self.waiting.add(timeline)
        admitted: list[tuple[RequestTimeline, int]] = []
        for number, cached in step.admitted:
            self._unseated.discard(number)
            if (timeline := self._admit(number, cached, step.started_ns)) is not None:
                admitted.append((timeline, timeline.request.num_prompt + timeline.num_published))
        for number, spans in step.lookups:
            if (timeline := self._timelines.get(number)) is not None and not timeline.prompt_spans:
                timeline.prompt_spans = spans
        changes.admitted = admitted

    def _admit(self, number: int, cached: int, now_ns: int) -> RequestTimeline | None:
        timeline = self.waiting.remove(number, now_ns)
        if timeline is not None:
            timeline.admit(cached, now_ns)
            self._starting[number] = timeline
        return timeline

    def _stall(self, step: StepRecord) -> None:
        """Sets why running requests have no row."""
        for timeline in self.stalled:
            if timeline.is_running:
                timeline.reason = ""
        self.stalled = []
        for number, reason in step.plan.refused:
            if number not in self.waiting and (stalled := self.get(number)) is not None:
                stalled.reason = reason
                self.stalled.append(stalled)

    # -- a result ------------------------------------------------------------------------------------------------

    def result(self, step: StepRecord, changes: Changes) -> None:
        """Applies what a step computed, and the ends of requests."""
        if step.plan.request_ids:
            if self._unseated:
                self._seat(step)
            self._publish(step, changes)
            self._last = step
            if self._starting:
                self._start(step)
        if step.ended:
            self._end(step, changes)
        if isinstance(step.inputs.configured, Scheduling):
            self.scheduling = step.inputs.configured
        self.num_running, self.num_waiting = step.counters.num_running, step.counters.num_waiting
        self.num_free_blocks = step.counters.num_free_blocks

    def _publish(self, step: StepRecord, changes: Changes) -> None:
        """Counts the tokens of each row: one for all that had one in the last step with rows, too."""
        streams, numbers = self._streams, step.plan.request_ids
        others: list[tuple[int, int]] = []  # the other rows with tokens: number, tokens
        counts = list(map(len, step.tokens))
        each_has_one = counts.count(1) == len(numbers)
        last = self._last.plan.request_ids if self._last is not None else ()
        if not each_has_one or last != numbers or len(streams) != len(numbers):
            single = set(numbers) if each_has_one else set(compress(numbers, map((1).__eq__, counts)))
            if len(single.intersection(streams)) < len(streams):
                for number in set(streams).difference(single):
                    self._interrupt(number)
            others = [(number, 1) for number in sorted(single.difference(streams))]
            if not each_has_one:
                others += [(number, count) for number, count in zip(numbers, counts, strict=False) if count > 1]
        going_on = len(streams)
        gaps = {step.ended_ns - self._streamed_ns: going_on} if going_on else {}
        self._num_streamed += 1
        self._streamed_ns = step.ended_ns
        changes.gaps, changes.num_tokens = gaps, going_on
        if others:
            self._publish_apart(others, gaps, changes)

    def _publish_apart(self, rows: Sequence[tuple[int, int]], gaps: dict[int, int], changes: Changes) -> None:
        """Counts the tokens of rows with (number, tokens) which had none in the last step, or have several."""
        first_tokens, now = [], self._streamed_ns
        for number, num_tokens in rows:
            if (timeline := self._timelines.get(number)) is None:
                continue
            if timeline.last_token_ns:
                gap = now - timeline.last_token_ns
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                timeline.first_token_ns = now
                first_tokens.append(timeline)
            timeline.num_published += num_tokens
            timeline.last_token_ns = now
            changes.num_tokens += num_tokens
            if num_tokens == 1:
                self._streams[number] = self._num_streamed
        changes.first_tokens = first_tokens

    def _interrupt(self, number: int) -> None:
        """Ends a stream: adds its tokens to its timeline.  If its row goes on, its next token begins another one."""
        if (began := self._streams.pop(number, None)) is not None:
            timeline = self._timelines[number]
            timeline.num_published += self._num_streamed - began
            timeline.last_token_ns = self._streamed_ns

    def _place(self, numbers: Iterable[int]) -> None:
        """Sets the slots and the computed tokens of rows of the last step."""
        last = self._last
        for number in numbers:
            timeline = self._timelines.get(number)
            if last is not None and timeline is not None and timeline.is_running:
                row = last.plan.request_ids.index(number)
                timeline.slot, timeline.computed = last.plan.slots[row], last.next_position(row)

    def _seat(self, step: StepRecord) -> None:
        """Admits rows whose admission the log does not have."""
        for number in self._unseated.intersection(step.plan.request_ids):
            self._unseated.remove(number)
            self._admit(number, 0, step.started_ns)

    def _start(self, step: StepRecord) -> None:
        """Begins `decode` for rows that sampled their first token since their admission."""
        sampled = step.result.tokens
        for number in set(step.plan.request_ids).intersection(self._starting) if sampled else ():
            if sampled[step.plan.request_ids.index(number)]:
                self._starting.pop(number).enter(DECODE, step.ended_ns)

    def _end(self, step: StepRecord, changes: Changes) -> None:
        ended = []
        for end in step.ended:
            timeline = self._timelines.get(end.request_id)
            if timeline is None or timeline.over_at >= 0:
                continue
            self._interrupt(end.request_id)
            self.waiting.remove(end.request_id, step.ended_ns)
            self._starting.pop(end.request_id, None)
            timeline.end(end, step.ended_ns, self._position)
            ended.append((timeline, end))
        changes.ended = ended


def gather(entries: Iterable[Entry]) -> dict[int, RequestTimeline]:
    """Returns the timelines of a log by request number, in order of arrival; omits requests with missing steps."""
    timelines = Timelines()
    for entry in entries:
        timelines.apply(entry)
    choices: dict[tuple[int, str], list[RequestTimeline]] = {}
    for timeline in timelines.by_number.values():
        choices.setdefault((timeline.received_ns, timeline.response_id), []).append(timeline)
    for together in choices.values():
        last = LastEnds.of(together)
        for timeline in together:
            timeline.meet(last)
    return {number: timeline for number, timeline in timelines.by_number.items() if timeline.is_whole}

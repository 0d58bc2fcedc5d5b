"""Spans of each request, in sequence, folded from the entries of an event log.

    received                                                                                last byte sent
       │ tokenising │ queue │ prefill │ decode │ preempted │ recompute │ decode │ ... │ sending │

These are the stages of `observe.explain` without its attribution: a span is a measured interval.  The attributes of the
`queue` span hold the waiting times by reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slotwise.observe.event_log import Command, Entry, Request, Run, Sent, Step
from slotwise.observe.waste import STEP_UNDER_WAY

TOKENISING, QUEUE, PREFILL, DECODE, PREEMPTED, RECOMPUTE, SENDING = (
    "tokenising", "queue", "prefill", "decode", "preempted", "recompute", "sending")
ANSWERED = ("stop", "length")  # ends after which a response is sent, and its `Sent` comes
MAX_UNSENT = 4096  # ended requests whose `Sent` is awaited; beyond it the oldest are returned without
NS = 1e-9


class Span(NamedTuple):
    """A stage of a request.  Times are monotonic nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    waited: dict[str, float]  # seconds, by reason


class RequestSpans:
    """A request's stages so far; `stage` is open since `since_ns`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.spans: list[Span] = []
        self.stage = QUEUE
        self.since_ns = request.ns
        self.waited: dict[str, float] = {}
        self.waits_for = STEP_UNDER_WAY
        self.charged_ns = request.ns  # until when its waiting is attributed
        self.num_cached = self.num_preemptions = 0
        self.first_token_ns = self.left_ns = self.ended_ns = self.sent_ns = 0
        self.end_reason = self.message = ""
        self.num_output = 0
        if request.received_ns:
            self.spans.append(Span(TOKENISING, request.received_ns, request.ns, {}))

    @property
    def start_ns(self) -> int:
        return self.spans[0].start_ns if self.spans else self.request.ns

    @property
    def end_ns(self) -> int:
        return max([self.request.ns, *(span.end_ns for span in self.spans)])

    def turn(self, now_ns: int, stage: str) -> None:
        """Closes the current stage at `now_ns` and opens `stage`."""
        waited, self.waited = self.waited, {}
        self.spans.append(Span(self.stage, self.since_ns, max(now_ns, self.since_ns), waited))
        self.stage, self.since_ns = stage, max(now_ns, self.since_ns)

    def charge(self, now_ns: int) -> None:
        """Attributes the waiting until `now_ns` to the reason of the last plan."""
        if now_ns > self.charged_ns:
            waited = (now_ns - self.charged_ns) * NS
            self.waited[self.waits_for] = self.waited.get(self.waits_for, 0.0) + waited
            self.charged_ns = now_ns

    def end(self, now_ns: int) -> None:
        """Opens the `sending` stage when the engine ends the request, or at the command that finished it before."""
        self.ended_ns = now_ns
        if self.stage in (QUEUE, PREEMPTED):
            self.charge(now_ns)
        self.turn(min(now_ns, self.left_ns or now_ns), SENDING)


class Spans:
    """Folds entries in order; returns the spans of completed requests.

    Its size is bounded by the unfinished requests and `MAX_UNSENT`.
    """

    def __init__(self) -> None:
        self._requests: dict[int, RequestSpans] = {}
        self._waiting: dict[int, RequestSpans] = {}
        self._starting: dict[int, RequestSpans] = {}  # admitted, without a token since
        self._unsent: dict[int, RequestSpans] = {}  # ended

    def feed(self, entry: Entry) -> Iterator[RequestSpans]:
        match entry:
            case Step():
                yield from self._step(entry)
            case Request():
                self._requests[entry.number] = self._waiting[entry.number] = RequestSpans(entry)
            case Command():
                if (request_spans := self._requests.get(entry.number)) is not None:
                    request_spans.left_ns = entry.ns
            case Sent():
                yield from self._sent(entry)
            case Run():
                for requests in (self._requests, self._waiting, self._starting):
                    requests.clear()

    def _step(self, step: Step) -> Iterator[RequestSpans]:
        for request_spans in self._waiting.values():
            request_spans.charge(step.started_ns)
        for number, _, _ in step.preempted:
            if (request_spans := self._requests.get(number)) is not None:
                self._starting.pop(number, None)
                request_spans.num_preemptions += 1
                request_spans.turn(step.started_ns, PREEMPTED)
                request_spans.charged_ns = request_spans.since_ns
                self._waiting[number] = request_spans
        for number, cached in step.admitted:
            if (request_spans := self._waiting.pop(number, None)) is not None:
                request_spans.num_cached = request_spans.num_cached if request_spans.num_preemptions else cached
                request_spans.turn(step.started_ns, RECOMPUTE if request_spans.num_preemptions else PREFILL)
                self._starting[number] = request_spans
        self._reasons(step)
        if self._starting:
            self._tokens(step)
        for number, reason, num_output, message in step.ended:
            if (request_spans := self._requests.pop(number, None)) is not None:
                self._waiting.pop(number, None)
                self._starting.pop(number, None)
                request_spans.end_reason, request_spans.num_output, request_spans.message = reason, num_output, message
                request_spans.end(step.ended_ns)
                yield from self._ended(number, request_spans)

    def _reasons(self, step: Step) -> None:
        """Sets the reasons of the requests that this plan left waiting; later arrivals are not in the plan."""
        if step.stop is None:
            return
        named = dict(step.refused)
        for number, request_spans in self._waiting.items():
            if request_spans.request.ns <= step.started_ns:
                request_spans.waits_for = named.get(number, step.stop.reason)

    def _tokens(self, step: Step) -> None:
        for number, tokens in zip(step.numbers, step.sampled or step.tokens, strict=False):
            if tokens and (request_spans := self._starting.pop(number, None)) is not None:
                request_spans.first_token_ns = request_spans.first_token_ns or step.ended_ns
                request_spans.turn(step.ended_ns, DECODE)

    def _ended(self, number: int, request_spans: RequestSpans) -> Iterator[RequestSpans]:
        if request_spans.sent_ns:  # the response was complete before the engine ended the request
            request_spans.turn(request_spans.sent_ns, "")
        if request_spans.sent_ns or request_spans.end_reason not in ANSWERED:
            yield request_spans
            return
        self._unsent[number] = request_spans
        if len(self._unsent) > MAX_UNSENT:
            yield self._unsent.pop(next(iter(self._unsent)))

    def _sent(self, sent: Sent) -> Iterator[RequestSpans]:
        if (living := self._requests.get(sent.number)) is not None:
            living.sent_ns = sent.last_ns
        elif (request_spans := self._unsent.pop(sent.number, None)) is not None:
            request_spans.sent_ns = sent.last_ns
            request_spans.turn(sent.last_ns, "")
            yield request_spans

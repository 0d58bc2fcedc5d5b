"""Each request's way as spans, one after the other, folded from the entries of an event log.

    received                                                                                last byte sent
       │ tokenising │ queue │ prefill │ decode │ preempted │ recompute │ decode │ ... │ sending │

These are the stages of `observe.explain`, without its arithmetic: a span is what a clock saw.  How long a request
waited for what stands in the attributes of its queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slotwise.observe.log import Command, Entry, Request, Run, Sent, Step
from slotwise.observe.waste import STEP_UNDER_WAY

TOKENISING, QUEUE, PREFILL, DECODE, PREEMPTED, RECOMPUTE, SENDING = (
    "tokenising", "queue", "prefill", "decode", "preempted", "recompute", "sending")
ANSWERED = ("stop", "length")  # ends after which a response is sent, and its `Sent` comes
MAX_UNSENT = 4096  # ended, with a response on its way; the oldest of more are told without it
NS = 1e-9


class Span(NamedTuple):
    """A stage.  Monotonic nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    waited: dict[str, float]  # seconds, by reason


class Life:
    """A request's stages so far; the last one is open until `since`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.spans: list[Span] = []
        self.stage = QUEUE
        self.since_ns = request.ns
        self.waited: dict[str, float] = {}
        self.waits_for = STEP_UNDER_WAY
        self.charged_ns = request.ns  # until when it is known what it waited for
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
        """The stage it was in is over, and it is in another."""
        waited, self.waited = self.waited, {}
        self.spans.append(Span(self.stage, self.since_ns, max(now_ns, self.since_ns), waited))
        self.stage, self.since_ns = stage, max(now_ns, self.since_ns)

    def charge(self, now_ns: int) -> None:
        """It has waited until now, for what the plan before had to say."""
        if now_ns > self.charged_ns:
            waited = (now_ns - self.charged_ns) * NS
            self.waited[self.waits_for] = self.waited.get(self.waits_for, 0.0) + waited
            self.charged_ns = now_ns

    def end(self, now_ns: int) -> None:
        """The engine has said its last; its client may have been told before."""
        self.ended_ns = now_ns
        if self.stage in (QUEUE, PREEMPTED):
            self.charge(now_ns)
        self.turn(min(now_ns, self.left_ns or now_ns), SENDING)


class Spans:
    """Takes entries in their order, and gives back those whose way is complete.

    What it keeps is bounded by who lives, and by `MAX_UNSENT`.
    """

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}
        self._waiting: dict[int, Life] = {}
        self._starting: dict[int, Life] = {}  # seated, and without a token since
        self._unsent: dict[int, Life] = {}  # ended

    def take(self, entry: Entry) -> Iterator[Life]:
        match entry:
            case Step():
                yield from self._step(entry)
            case Request():
                self._lives[entry.number] = self._waiting[entry.number] = Life(entry)
            case Command():
                if (life := self._lives.get(entry.number)) is not None:
                    life.left_ns = entry.ns
            case Sent():
                yield from self._sent(entry)
            case Run():
                for lives in (self._lives, self._waiting, self._starting):
                    lives.clear()

    def _step(self, step: Step) -> Iterator[Life]:
        for life in self._waiting.values():
            life.charge(step.started_ns)
        for number, _, _ in step.preempted:
            if (life := self._lives.get(number)) is not None:
                self._starting.pop(number, None)
                life.num_preemptions += 1
                life.turn(step.started_ns, PREEMPTED)
                life.charged_ns = life.since_ns
                self._waiting[number] = life
        for number, cached in step.admitted:
            if (life := self._waiting.pop(number, None)) is not None:
                life.num_cached = life.num_cached if life.num_preemptions else cached
                life.turn(step.started_ns, RECOMPUTE if life.num_preemptions else PREFILL)
                self._starting[number] = life
        self._reasons(step)
        if self._starting:
            self._tokens(step)
        for number, reason, num_output, message in step.ended:
            if (life := self._lives.pop(number, None)) is not None:
                self._waiting.pop(number, None)
                self._starting.pop(number, None)
                life.end_reason, life.num_output, life.message = reason, num_output, message
                life.end(step.ended_ns)
                yield from self._ended(number, life)

    def _reasons(self, step: Step) -> None:
        """What those wait for who wait after this plan; it does not know who came after it was made."""
        if step.stop is None:
            return
        named = dict(step.refused)
        for number, life in self._waiting.items():
            if life.request.ns <= step.started_ns:
                life.waits_for = named.get(number, step.stop.reason)

    def _tokens(self, step: Step) -> None:
        for number, tokens in zip(step.numbers, step.sampled or step.tokens, strict=False):
            if tokens and (life := self._starting.pop(number, None)) is not None:
                life.first_token_ns = life.first_token_ns or step.ended_ns
                life.turn(step.ended_ns, DECODE)

    def _ended(self, number: int, life: Life) -> Iterator[Life]:
        if life.sent_ns:  # its client needed no more of it
            life.turn(life.sent_ns, "")
        if life.sent_ns or life.end_reason not in ANSWERED:
            yield life
            return
        self._unsent[number] = life
        if len(self._unsent) > MAX_UNSENT:
            yield self._unsent.pop(next(iter(self._unsent)))

    def _sent(self, sent: Sent) -> Iterator[Life]:
        if (living := self._lives.get(sent.number)) is not None:
            living.sent_ns = sent.last_ns
        elif (life := self._unsent.pop(sent.number, None)) is not None:
            life.sent_ns = sent.last_ns
            life.turn(sent.last_ns, "")
            yield life

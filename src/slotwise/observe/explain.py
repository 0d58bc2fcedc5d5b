"""Divides a request's time into named parts that sum to the time its client waited, to the nanosecond.

    received                                                                                       last byte sent
       │ tokenizing │ handing over │ queue, by reason │ prefill, decode; neighbors; ... │ siblings │ sending │

Inside the engine the time is divided at the steps: the time between the ends of two steps gets the part that the later
step's plan gives the request.  If the request is a row, its own share is the time of that work alone, by the step-time
model, and the rest is its neighbors'; if not, the plan has the reason.  The parts cover all time; there is no "other".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from slotwise.core import cache_causes
from slotwise.core.record import ANOTHER_REQUEST, NO_STEP, RowKind, StepRecord
from slotwise.core.step_time import Prediction, StepTimeModel, Work, work_of
from slotwise.engine.scheduling import Scheduling
from slotwise.observe.event_log import CommandEntry, EngineLost, Entry, decode
from slotwise.observe.explain_words import cache_sentence, sentence
from slotwise.observe.fold import Timelines
from slotwise.observe.request_timeline import STEP_UNDER_WAY, RequestTimeline

NS, MS = 1e-9, 1e-6
NOWHERE = -2  # step of a span outside all steps

PARTS = {
    "tokenizing": "reading the body, rendering the template, tokenization",
    "handing_over": "transfer to the engine process, while that is between two steps",
    "queue": "waiting for the first slot, by reason",
    "scheduling": "between two steps, while the next one is planned",
    "prefill": "computing its prompt, in the time that this is predicted to take alone",
    "decode": "computing its output, in the time that this is predicted to take alone",
    "neighbors": "the rest of those steps: the cost of their further rows",
    "held": "finished, and held until its batch drains",
    "paused": "with a slot and without a row in a step, by reason",
    "preempted": "without a slot after a preemption, waiting to return, by reason",
    "recompute": "recomputing the positions that a preemption lost",
    "failed_step": "in a step that failed, or in which the engine was lost",
    "siblings": "waiting for the other choices of its response",
    "sending": "detokenizing and sending",
}
ORDER = {part: place for place, part in enumerate(PARTS)}


class Span(NamedTuple):
    """An interval of a request's time."""

    part: str
    reason: str  # of the plan, where it is one; else empty
    ns: int
    step: int  # the step it belongs to; NO_STEP or NOWHERE if none


class Share(NamedTuple):
    """The sum of a request's spans of one part and reason."""

    part: str
    reason: str
    ns: int
    steps: int  # number of its steps
    first_step: int
    last_step: int

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"part": self.part, "reason": self.reason or None, "ms": round(self.ns * MS, 6)}
        if self.steps:
            shown |= {"steps": self.steps, "first_step": self.first_step, "last_step": self.last_step}
        return shown


class CacheSpan(NamedTuple):
    """A span of a prompt: why it was found in the prefix cache or was not, and how long it takes to compute."""

    cause: str  # `core/cache_causes.py`
    start: int  # position of its first token
    end: int  # position behind its last token
    ns: int  # predicted, alone
    before_ns: int = 0  # from its eviction, or for `new` from the start of the engine, to the request's first slot
    request_id: int = ANOTHER_REQUEST  # for which it was evicted; only of the same tenant
    position: int = 0  # the first token that differs from the nearest cached prompt

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_found(self) -> bool:
        return self.cause in cache_causes.NOT_COMPUTED

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"cause": self.cause, "from": self.start, "to": self.end, "tokens": self.num_tokens,
                                 "seconds": round(self.ns * NS, 6)}
        if self.cause == cache_causes.DIVERGED:
            shown["diverged_at"] = self.position
        elif self.cause == cache_causes.EVICTED:
            shown["evicted_s_before"] = round(self.before_ns * NS, 3)
            shown["evicted_for"] = "another request" if self.request_id == ANOTHER_REQUEST else self.request_id
        elif self.cause == cache_causes.NEW and self.before_ns:
            shown["engine_started_s_before"] = round(self.before_ns * NS, 3)
        return shown


class Explanation(NamedTuple):
    """A request's time: `spans` in order, which sum to `total_ns`."""

    timeline: RequestTimeline
    spans: tuple[Span, ...]
    num_cached: int
    num_preemptions: int
    num_drafts: int = 0
    num_accepted: int = 0  # drafts that were right
    cache: tuple[CacheSpan, ...] = ()  # of the prompt, once it has a slot

    @property
    def total_ns(self) -> int:
        return sum(span.ns for span in self.spans)

    @property
    def shares(self) -> list[Share]:
        """The spans summed by part and reason, in the order of `PARTS`."""
        found: dict[tuple[str, str], list[Span]] = {}
        for span in self.spans:
            found.setdefault((span.part, span.reason), []).append(span)
        shares = []
        for (part, reason), spans in sorted(found.items(), key=lambda one: ORDER[one[0][0]]):
            steps = dict.fromkeys(span.step for span in spans if span.step >= 0)
            first, last = (min(steps), max(steps)) if steps else (NOWHERE, NOWHERE)
            shares.append(Share(part, reason, sum(span.ns for span in spans), len(steps), first, last))
        return shares

    def ns(self, part: str) -> int:
        return sum(span.ns for span in self.spans if span.part == part)

    def as_json(self) -> dict[str, Any]:
        timeline = self.timeline
        return {
            "id": timeline.request.id, "number": timeline.request.number,
            "adapter": timeline.request.spec.adapter_name or None, "finish_reason": timeline.end_reason or None,
            "prompt_tokens": timeline.request.num_prompt, "cached_tokens": self.num_cached,
            "completion_tokens": timeline.num_output, "preemptions": self.num_preemptions,
            "draft_tokens": self.num_drafts, "accepted_draft_tokens": self.num_accepted,
            "retained_tokens": timeline.num_retained,
            "total_ms": round(self.total_ns * MS, 6), "sentence": sentence(self),
            "parts": [share.as_json() for share in self.shares],
            "cache": {"sentence": cache_sentence(self.cache), "spans": [span.as_json() for span in self.cache]}}


def explain(
    timeline: RequestTimeline, entries: Sequence[Entry], times: StepTimeModel, until_ns: int = 0,
) -> Explanation:
    """Explains one request.

    Args:
        entries: the log from which `timeline` was gathered.
        until_ns: when its response is complete, if the log has no `Sent` yet; 0: up to the end of the log.
    """
    return explain_by(timeline, (entries[at] for at in range(timeline.position + 1, len(entries))), times, until_ns)


def explain_by(
    timeline: RequestTimeline, following: Iterable[Entry], times: StepTimeModel, until_ns: int = 0,
) -> Explanation:
    """Explains one request by the steps, commands and lost engines that follow it in the log, up to its end."""
    builder = _ExplanationBuilder(timeline, Solo(times, timeline.scheduling), until_ns)
    builder.feed(following)
    return builder.explanation()


class Solo:
    """Predicts the time of work that runs alone, at the machine's typical speed.  0 while the model is empty."""

    def __init__(self, times: StepTimeModel, scheduling: Scheduling | None) -> None:
        self._times = times
        self.scheduled(scheduling)

    def scheduled(self, scheduling: Scheduling | None) -> None:
        """Sets the chunk size of prompts from now on."""
        self._chunk = 1 << 30  # tokens of a prompt in one step
        if scheduling is None or scheduling.batching.kind != "continuous":
            return
        if scheduling.batching.prefill in (None, "chunked"):
            longest = scheduling.batching.long_prefill_token_threshold
            self._chunk = min(longest or self._chunk, scheduling.max_num_batched_tokens)

    def token(self, start: int) -> int:
        """Returns the nanoseconds of one token after `start` others."""
        return round(self._times.typical(Work(1, 1, start + 1, 0.0)) / NS)

    def chunk(self, first: int, known: int, start: int, count: int) -> int:
        """Returns the nanoseconds of `count` tokens from `start` on, of a prompt computed from `first` to `known`.

        Alone, the prompt would have the fewest possible chunks; these tokens get their share of those chunks' times.
        The time of a whole chunk is linear in its start, so a series of them takes the mean of the first and the last.
        """
        seconds, end, chunk = 0.0, start + count, self._chunk
        known = max(known, end)
        while start < end:  # at most three times: the end of a chunk, whole chunks, the beginning of another
            low = first + (start - first) // chunk * chunk
            if start == low and (more := (end - low) // chunk - 1) > 0:
                both = self._typical(low, low + chunk) + self._typical(low + more * chunk, low + (more + 1) * chunk)
                seconds += both * (more + 1) / 2
                start += (more + 1) * chunk
                continue
            high = max(min(low + chunk, known), start + 1)
            part = min(high, end) - start
            seconds += self._typical(low, high) * part / (high - low)
            start += part
        return round(seconds / NS)

    def cache_spans(self, timeline: RequestTimeline) -> tuple[CacheSpan, ...]:
        """Returns the spans of a prompt with the time that each takes to compute, found or not."""
        spans, start = list[CacheSpan](), 0
        first = max([span.end for span in timeline.prompt_spans if span.cause in cache_causes.NOT_COMPUTED], default=0)
        for end, cause, at, request_id, position in timeline.prompt_spans:
            is_found = cause in cache_causes.NOT_COMPUTED
            ns = self.chunk(*((0, first) if is_found else (first, timeline.request.num_prompt)), start, end - start)
            before = 0
            if cause == cache_causes.EVICTED and at:
                before = max(0, timeline.admitted_ns - round(at / NS))
            elif cause == cache_causes.NEW and timeline.engine_ns:
                before = max(0, timeline.admitted_ns - timeline.engine_ns)
            spans.append(CacheSpan(cause, start, end, ns, before, request_id, position))
            start = end
        return tuple(spans)

    def _typical(self, low: int, high: int) -> float:
        """Returns the seconds of the tokens from `low` to before `high`, in one step."""
        return self._times.typical(work_of([low], [high - low]))


class _ExplanationBuilder:
    """Divides one request's time into spans while it reads the log; `_at` is the end of the last span.

    `_timeline` is the whole history, and `_now` the history up to the plan of the step that is read.
    """

    def __init__(self, timeline: RequestTimeline, solo: Solo, until_ns: int) -> None:
        self._timeline = timeline
        self._number = timeline.request.number
        self._fold = Timelines()
        self._fold.apply(timeline.request)
        self._now = self._fold.by_number[self._number]
        self._solo = solo
        self._cache = solo.cache_spans(timeline)
        self._end = timeline.end_ns if timeline.last_byte_ns else until_ns or timeline.end_ns
        self._spans: list[Span] = []
        self._at = timeline.received_ns
        self._why: tuple[str, str, int] | None = None  # part, reason and step of the plan that left it waiting
        self._over = False
        self._num_drafts = self._num_accepted = 0
        self._spend(timeline.tokenized_ns, "tokenizing")
        self._spend(timeline.request.ns, "handing_over")

    def feed(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if self._over:
                return
            if isinstance(entry, StepRecord):
                self._step(entry)
            elif isinstance(entry, CommandEntry) and entry.number == self._number and entry.reason == "stop":
                self._over = True  # a stop string matched: later tokens are discarded
            elif isinstance(entry, EngineLost):
                self._lost(entry.ns)

    def explanation(self) -> Explanation:
        timeline = self._timeline
        if timeline.ended:
            if not self._over and not self._now.is_running:
                self._waits(timeline.left_ns)
            self._over = True
            self._spend(timeline.siblings_ended_ns, "siblings")
            self._spend(self._end, "sending")
        return Explanation(timeline, tuple(self._spans), self._now.num_cached, self._now.num_preemptions,
                           self._num_drafts, self._num_accepted, self._cache)

    def _spend(self, until: int, part: str, reason: str = "", step: int = NOWHERE) -> None:
        """Assigns the time up to `until` to `part`."""
        if self._end:
            until = min(until, self._end)
        if not self._over and self._timeline.left_ns:
            until = min(until, self._timeline.left_ns)  # aborted then, whatever the engine did later
        if until > self._at:
            self._spans.append(Span(part, reason, until - self._at, step))
            self._at = until

    # -- a step --------------------------------------------------------------------------------------------------

    def _step(self, entry: StepRecord) -> None:
        if entry.step == NO_STEP:
            self._between(entry)
        else:
            self._waits(entry.started_ns)
            self._now = self._fold.by_number[self._number]
            changes = self._fold.plan(entry)
            if not 0 < self._timeline.taken_ns <= entry.started_ns:
                self._spend(entry.ended_ns, "queue", STEP_UNDER_WAY, entry.step)
            else:
                self._turn(entry)
            self._fold.result(entry, changes)
        if isinstance(entry.inputs.configured, Scheduling):
            self._solo.scheduled(entry.inputs.configured)
        self._over = 0 < self._timeline.left_ns <= self._at or self._now.over_at >= 0

    def _turn(self, entry: StepRecord) -> None:
        """Handles a step whose plan was made after the engine had received the request."""
        now = self._now
        if self._number in entry.plan.request_ids:
            self._row(entry, entry.plan.request_ids.index(self._number))
        elif reason := self._refusal(entry):
            part = "paused" if now.is_running else "preempted" if now.num_preemptions else "queue"
            self._why = (part, reason, entry.step)
            self._spend(entry.ended_ns, *self._why)
        else:  # neither a row nor refused: the request had ended when the step was planned
            self._spend(entry.ended_ns, "sending" if self._timeline.ended else "scheduling")

    def _refusal(self, entry: StepRecord) -> str:
        """Why the plan of `entry` leaves the request out; empty if it gives no reason."""
        given = dict(entry.plan.refused) | {number: reason for number, reason, _ in entry.preempted}
        if self._number in given:
            return given[self._number]
        waits = self._now.is_waiting and not self._ends_in(entry)
        return entry.plan.stop.reason if entry.plan.stop is not None and waits else ""

    def _ends_in(self, entry: StepRecord) -> bool:
        return any(end.request_id == self._number for end in entry.ended)

    def _row(self, entry: StepRecord, row: int) -> None:
        """Adds its own share of the step, then its neighbors'."""
        start, count, step = entry.plan.starts[row], entry.plan.counts[row], entry.step
        if row in entry.plan.held:
            self._spend(entry.ended_ns, "held", "", step)
            return
        if entry.plan.drafts and entry.plan.drafts[row]:
            self._num_drafts += len(entry.plan.drafts[row])
            self._num_accepted += max(0, len(entry.result.tokens[row]) - 1)
        num_prompt = self._timeline.request.num_prompt
        again = min(max(self._now.reached - start, 0), count)
        is_decode = entry.plan.kinds[row] is RowKind.DECODE and not again
        began = self._at
        own = entry.ended_ns - began
        if len(entry.plan.request_ids) > 1 or entry.plan.padding:
            known = num_prompt + self._now.num_published
            alone = (self._solo.token(start) if is_decode else
                     self._solo.chunk(self._now.cached, known, start, count))
            own = min(own, alone or own)
        self._spend(began + own * again // count, "recompute", "", step)
        self._spend(began + own, "decode" if is_decode else "prefill", "", step)
        self._spend(entry.ended_ns, "neighbors", "", step)

    # -- between steps -------------------------------------------------------------------------------------------

    def _waits(self, until: int) -> None:
        """Adds the time to the next step: the last plan's reason holds until there is another plan."""
        taken = self._timeline.taken_ns
        self._spend(min(taken, until) if taken else until, "handing_over")
        if not self._now.is_running and self._why is not None:
            self._spend(until, *self._why)
        else:
            self._spend(until, "scheduling")

    def _between(self, entry: StepRecord) -> None:
        """Handles a record without a step: a request ended, or a step failed."""
        changes = self._fold.plan(entry)
        failed = self._ends_in(entry) and self._timeline.end_reason == "error"
        if self._now.is_running and (failed or entry.ended_ns > entry.started_ns):
            self._spend(entry.started_ns, "scheduling")
            self._spend(entry.ended_ns, "failed_step", "", entry.step)
        else:
            self._waits(entry.ended_ns)
        self._fold.result(entry, changes)

    def _lost(self, ns: int) -> None:
        if self._now.is_running:
            self._spend(ns, "failed_step", "", NO_STEP)
        else:
            self._waits(ns)
        self._over = True


def _explain_lines(timelines: Sequence[Any], positions: Sequence[int], lines: bytes, prediction: Any, until_ns: int,
                   ) -> list[dict[str, Any]]:
    """Returns the explanations of requests, as JSON objects.  Runs in a worker process (`api/http/worker_process.py`).

    Args:
        timelines, positions, lines: an `observe.ring.Extract`.
        prediction: parameters of the step-time model.
        until_ns: when a response is complete, if the log has no `Sent` yet.
    """
    times = StepTimeModel.predicting(msgspec.convert(prediction, Prediction))
    entries = list(map(decode, lines.splitlines()))
    explanations = []
    for one in msgspec.convert(timelines, list[RequestTimeline]):
        last = one.over_at if one.over_at >= 0 else max(positions, default=0)
        following = [entry for position, entry in zip(positions, entries, strict=True)
                     if one.position < position <= last]
        explanations.append(explain_by(one, following, times, until_ns).as_json())
    return explanations


CALLS = {"explain": _explain_lines}

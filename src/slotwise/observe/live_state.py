"""The live state: running requests with slot and progress, waiting requests with reasons, and recent rates.

Read from the timelines of an event log's requests, live or from a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from slotwise.core.record import StepRecord
from slotwise.observe import step_view
from slotwise.observe.event_log import EngineLost, Entry, Gap, RequestEntry, Run, Sent
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.request_timeline import DECODE, NO_SLOT, PREFILL, RequestTimeline

WINDOW = 10.0  # seconds over which rates are computed
MAX_LATELY = 8192  # most steps kept of them
HELD, STALLED, WAITS = "held", "stalled", "waits"


class Lately(NamedTuple):
    """A step within the window, or the sums of several."""

    ended_ns: int
    seconds: float
    tokens: int  # computed for requests
    prompt: int  # those of prompts
    published: int  # tokens
    wasted: int  # padding and held
    slots: int
    rows: int
    steps: int  # 1 if it has rows
    ended: int


class Rates(NamedTuple):
    """Rates over the window; counts are per second."""

    steps: float
    prompt_tokens: float
    output_tokens: float
    requests: float
    step_seconds: float  # the mean
    step_tokens: float  # the mean
    empty: float  # share of the slots without a row
    wasted: float  # share of the computed tokens


class LiveState(Timelines):
    """Folds entries in order; its size is bounded by the unfinished requests and the window."""

    def __init__(self) -> None:
        super().__init__()
        self.down = ""  # why there is no engine; empty while there is one
        self.last: StepRecord | None = None  # with rows
        self.now_ns = 0  # of the latest entry
        self._lately: deque[Lately] = deque(maxlen=MAX_LATELY)

    def apply(self, entry: Entry) -> Changes:
        if isinstance(entry, StepRecord):
            self._note(entry)
        changes = super().apply(entry)
        for _, end in changes.ended:
            self.drop(end.request_id)
        match entry:
            case StepRecord():
                self.now_ns = max(self.now_ns, entry.ended_ns)
            case RequestEntry():
                self.now_ns = max(self.now_ns, entry.ns)
            case Sent():
                self.now_ns = max(self.now_ns, entry.last_ns)
            case Run():
                self.down = ""
                self.now_ns = max(self.now_ns, entry.started_ns)
            case EngineLost():
                self.down = entry.message or entry.state
        if isinstance(entry, Run | EngineLost | Gap):
            self.clear()
        return changes

    @property
    def slots(self) -> int:
        return self.scheduling.max_num_seqs if self.scheduling is not None else 0

    @property
    def requests(self) -> Mapping[int, RequestTimeline]:
        """The unfinished requests by number, in order of arrival."""
        return self.by_number

    def seated(self) -> list[RequestTimeline]:
        """The running requests, by slot."""
        return sorted((one for one in self.requests.values() if one.slot != NO_SLOT), key=lambda one: one.slot)

    def queue(self) -> list[RequestTimeline]:
        """The waiting requests, in order of arrival."""
        return [one for one in self.requests.values() if one.slot == NO_SLOT]

    def phase(self, one: RequestTimeline) -> str:
        """What the request does: prefill, decode, held, stalled or waits."""
        if one.slot == NO_SLOT:
            return WAITS
        if self.last is not None and one.request.number in [self.last.plan.request_ids[row]
                                                            for row in self.last.plan.held]:
            return HELD
        return STALLED if one.reason else DECODE if one.stage == DECODE else PREFILL

    def rates(self, now_ns: int) -> Rates:
        """Returns the rates over the window before `now_ns`, or since the first step kept."""
        lately = [step for step in self._lately if now_ns - step.ended_ns < WINDOW * 1e9]
        if not lately:
            return Rates(0, 0, 0, 0, 0, 0, 0, 0)
        seconds = max(1e-3, min(WINDOW, (now_ns - lately[0].ended_ns) * 1e-9 + lately[0].seconds))
        total = Lately(*map(sum, zip(*lately, strict=True)))
        computed = total.tokens + total.wasted
        return Rates(
            total.steps / seconds, total.prompt / seconds, total.published / seconds, total.ended / seconds,
            total.seconds / max(1, total.steps), total.tokens / max(1, total.steps),
            1 - total.rows / total.slots if total.slots else 0.0, total.wasted / computed if computed else 0.0)

    def _note(self, step: StepRecord) -> None:
        """Adds a step to the window."""
        rows, held, began = len(step.plan.counts), step_view.held_tokens(step), step.started_ns
        if self.last is not None:
            began = max(began, self.last.ended_ns)
        self._lately.append(Lately(
            step.ended_ns, (step.ended_ns - began) * 1e-9 if rows else 0.0, sum(step.plan.counts) - held,
            self._prompt_tokens(step), sum(map(len, step.tokens)), held + sum(step.plan.padding),
            max(rows, self.slots) if rows else 0, rows, int(rows > 0), len(step.ended)))
        if rows:
            self.last = step

    def _prompt_tokens(self, step: StepRecord) -> int:
        """Returns the prompt tokens among those computed."""
        tokens = 0
        for number, start, count in zip(step.plan.request_ids, step.plan.starts, step.plan.counts, strict=True):
            if (timeline := self.get(number)) is not None:
                tokens += max(0, min(count, timeline.request.num_prompt - start))
        return tokens

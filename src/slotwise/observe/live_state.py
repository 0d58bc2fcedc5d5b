"""The live state: running requests with slot and progress, waiting requests with reasons, and recent rates.

Folded from the entries of an event log, live or from a file.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from slotwise.engine.scheduling import Scheduling
from slotwise.observe import waste
from slotwise.observe.event_log import Engine, Entry, Gap, Request, Run, Sent, Step

WINDOW = 10.0  # seconds over which rates are computed
MAX_LATELY = 8192  # most steps kept of them
NOT_SEATED = -1
PREFILL, DECODE, HELD, STALLED, WAITS = "prefill", "decode", "held", "stalled", "waits"


class LiveRequest:
    """State of an unfinished request."""

    __slots__ = ("admitted_ns", "cached", "computed", "phase", "reason", "request", "slot")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.slot = NOT_SEATED
        self.cached = self.computed = 0  # tokens
        self.admitted_ns = 0
        self.phase = WAITS
        self.reason = ""  # why it waits or has no row

    @property
    def num_output(self) -> int:
        """Tokens generated; the last one may not be published yet."""
        past = self.computed - self.request.num_prompt
        return past + 1 if past >= 0 and self.computed else 0


class Lately(NamedTuple):
    """A step within the window."""

    ended_ns: int
    seconds: float
    tokens: int  # computed for requests
    prompt: int  # those of prompts
    told: int  # tokens published
    wasted: int  # padding and held
    slots: int
    rows: int
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


class LiveState:
    """Folds entries in order; its size is bounded by the unfinished requests and the window."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.scheduling: Scheduling | None = None
        self.down = ""  # why there is no engine; empty while there is one
        self.requests: dict[int, LiveRequest] = {}  # in order of arrival
        self.waiting: dict[str, int] = {}  # by reason
        self.last: Step | None = None  # with rows
        self.now_ns = 0  # of the latest entry
        self.num_running = self.num_waiting = self.num_free_blocks = 0
        self._lately: deque[Lately] = deque(maxlen=MAX_LATELY)
        self._last_end = 0

    def feed(self, entry: Entry) -> None:
        match entry:
            case Step():
                self._step(entry)
            case Request():
                self.requests[entry.number] = LiveRequest(entry)
                self.now_ns = max(self.now_ns, entry.ns)
            case Run():
                self._begin(entry)
            case Sent():
                self.now_ns = max(self.now_ns, entry.last_ns)
            case Engine():
                self.down = entry.message or entry.state
                self.num_free_blocks = self.run.limits.num_blocks if self.run is not None else 0
                self._empty()
            case Gap():
                self._empty()

    @property
    def slots(self) -> int:
        return self.scheduling.max_num_seqs if self.scheduling is not None else 0

    @property
    def usage(self) -> float:
        """Share of cache blocks held by requests."""
        return 1 - self.num_free_blocks / self.run.limits.num_blocks if self.run is not None else 0.0

    def seated(self) -> list[LiveRequest]:
        """The running requests, by slot."""
        return sorted((live for live in self.requests.values() if live.slot != NOT_SEATED), key=lambda live: live.slot)

    def queue(self) -> list[LiveRequest]:
        """The waiting requests, in order of arrival."""
        return [live for live in self.requests.values() if live.slot == NOT_SEATED]

    def rates(self, now_ns: int) -> Rates:
        """Returns the rates over the window before `now_ns`, or since the first step kept."""
        lately = [step for step in self._lately if now_ns - step.ended_ns < WINDOW * 1e9]
        if not lately:
            return Rates(0, 0, 0, 0, 0, 0, 0, 0)
        seconds = max(1e-3, min(WINDOW, (now_ns - lately[0].ended_ns) * 1e-9 + lately[0].seconds))
        computed = sum([step.tokens for step in lately])
        wasted = sum([step.wasted for step in lately])
        slots = sum([step.slots for step in lately])
        with_rows = sum([step.rows > 0 for step in lately])
        return Rates(
            with_rows / seconds,
            sum([step.prompt for step in lately]) / seconds,
            sum([step.told for step in lately]) / seconds,
            sum([step.ended for step in lately]) / seconds,
            sum([step.seconds for step in lately]) / max(1, with_rows),
            computed / max(1, with_rows),
            1 - sum([step.rows for step in lately]) / slots if slots else 0.0,
            wasted / (computed + wasted) if computed + wasted else 0.0)

    # -- folding -------------------------------------------------------------------------------------------------

    def _begin(self, run: Run) -> None:
        self.run, self.scheduling, self.down = run, run.scheduling, ""
        self.now_ns = max(self.now_ns, run.started_ns)
        self.num_free_blocks = run.limits.num_blocks
        self._empty()

    def _empty(self) -> None:
        self.requests.clear()
        self.waiting = {}
        self.num_running = self.num_waiting = 0

    def _step(self, step: Step) -> None:
        self.now_ns = max(self.now_ns, step.ended_ns)
        for number, _, _ in step.preempted:
            if (live := self.requests.get(number)) is not None:
                live.slot, live.phase, live.computed = NOT_SEATED, WAITS, 0
        for number, cached in step.admitted:
            if (live := self.requests.get(number)) is not None:
                live.cached, live.admitted_ns = cached, step.started_ns
        prompt = self._rows(step)
        self._reasons(step)
        self._note(step, prompt)
        for number, _, _, _ in step.ended:
            self.requests.pop(number, None)
        if step.configured is not None:
            self.scheduling = step.configured
        if step.step >= 0 or not step.num_waiting:
            self.waiting = waste.why_waiting(step)
        self.num_running, self.num_waiting = step.num_running, step.num_waiting
        self.num_free_blocks = step.num_free_blocks

    def _reasons(self, step: Step) -> None:
        """Sets the reasons: a request in the plan's queue that was not examined waits for the stop's reason."""
        if step.stop is not None:
            for live in self.requests.values():
                if live.slot == NOT_SEATED and live.request.ns <= step.started_ns:
                    live.reason = step.stop.reason
        for number, reason in step.refused:
            if (live := self.requests.get(number)) is not None:
                live.reason = reason
                live.phase = WAITS if live.slot == NOT_SEATED else STALLED

    def _rows(self, step: Step) -> int:
        """Updates slot, progress and phase of each row; returns the prompt tokens among those computed."""
        prompt = 0
        for number, slot, start, count in zip(step.numbers, step.slots, step.starts, step.counts, strict=True):
            live = self.requests.get(number)
            if live is not None:
                live.slot, live.reason = slot, ""
                live.computed = start + count
                of_prompt = max(0, min(start + count, live.request.num_prompt) - start)
                prompt += of_prompt
                live.phase = PREFILL if of_prompt or count > 1 else DECODE
        for row in step.held:
            if (live := self.requests.get(step.numbers[row])) is not None:
                live.phase = HELD
        return prompt

    def _note(self, step: Step, prompt: int) -> None:
        held = waste.held_tokens(step)
        rows = len(step.counts)
        seconds = (step.ended_ns - max(step.started_ns, self._last_end)) * 1e-9 if rows else 0.0
        self._lately.append(Lately(
            step.ended_ns, seconds, sum(step.counts) - held, prompt, sum(map(len, step.tokens)),
            held + sum(step.padding), max(rows, self.slots) if rows else 0, rows, len(step.ended)))
        if rows:
            self.last, self._last_end = step, step.ended_ns

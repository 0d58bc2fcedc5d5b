"""What an event log says for a simulation: the server's setup, its traffic, and what was measured.

The step-time model goes on learning from the log's steps.  A log in a file holds prompts and outputs, so prefixes are
shared as they were, and drafts from texts are found again.  A server's ring has digests of prompts' pieces, so prefixes
are shared to the end of a piece, and a prompt that continues another one is assumed to repeat its output; a stream has
neither.  A draft model has the acceptance rate and the time per pass of the log.  Grammars are left out: the outputs
are known.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import ceil

from slotwise.core.record import StepRecord
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.core.speculation.speculation_settings import DRAFT_MODEL, PREDICTION, Speculation
from slotwise.core.step_time import Work, work_of
from slotwise.engine.messages import Add, Command, Configure, Finish
from slotwise.engine.scheduling import Scheduling
from slotwise.measure.simulate.figures import SERVED, SimulatedRequest, new_clock
from slotwise.measure.simulate.pace import LearnedPace, Spread
from slotwise.measure.simulate.simulator import Setup, count_prompts
from slotwise.measure.simulate.virtual_machine import SimulatedDraftModel
from slotwise.observe import event_log
from slotwise.observe.step_time_store import ObservedStepTimes

NS = 1e-9
USUAL = 0.99  # share of the gaps between steps that count: a pause of the whole machine is not typical
KEPT = 4096  # steps with and without prompts whose times are those of simulated ones
OWN = 1 << 32  # token ids from here on tell prompts apart that are not known
PIECES = 1 << 52  # those from here on stand for the tokens of a piece that several prompts may begin with


@dataclass
class Recording:
    """The last engine of a log.  Times are seconds of the log's clock."""

    run: event_log.Run
    times: ObservedStepTimes
    commands: list[tuple[float, Command]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # by request, as all that follow
    measured: dict[int, SimulatedRequest] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    num_prompt: dict[int, int] = field(default_factory=dict)  # tokens
    tenants: dict[int, str] = field(default_factory=dict)
    tiers: dict[int, str] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)  # requests whose beginning or end is not in the log
    scheduling: Scheduling | None = None  # the last that was set while the log was written; None: the engine's first
    num_refused: int = 0
    receives: bool = False  # prompts of its requests came from other engines or from disk
    handling: float = 0.0  # median seconds from a request's first bytes to the engine, and from its first token's step
    # to the first byte sent: tokenizing and detokenizing, which no simulation has

    @property
    def traffic(self) -> list[tuple[float, Command]]:
        """The commands; a request ends after as many tokens as it had, or as the median had if it was not served."""
        lengths = [len(self.outputs[number]) for number, one in self.measured.items() if one.reason in SERVED]
        typical = statistics.median_low(lengths) if lengths else 1
        return [(at, self._bounded(command, typical)) for at, command in self.commands]

    def _bounded(self, command: Command, typical: int) -> Command:
        if not isinstance(command, Add) or command.spec.pooling is not None:
            return command
        reason = self.measured[command.request_id].reason
        if reason == "abort":  # it runs until its client leaves
            return command
        seen = len(self.outputs[command.request_id])
        length = max(1, seen) if reason in ("", *SERVED) else typical
        return Add(command.request_id, replace(command.spec, forced_length=length), name=command.name)


def read_recording(entries: Iterable[event_log.Entry]) -> tuple[Setup, Recording]:
    """Returns the setup of a log's last engine, and its traffic.

    Raises:
        ValueError: the log has no engine, or its engine has taken no step.
    """
    reader: _Reader | None = None
    for entry in entries:
        if isinstance(entry, event_log.Run):
            reader = _Reader(entry)
        elif reader is not None:
            reader.feed(entry)
    if reader is None:
        raise ValueError("the log does not begin with an engine's start: was it saved from a stream?")
    if not reader.recording.times.is_trained:
        raise ValueError("the log has no steps, from which a machine's step times could be learned")
    return reader.setup(), reader.recording


class _Reader:
    def __init__(self, run: event_log.Run) -> None:
        self.recording = Recording(run, ObservedStepTimes(run.learned))
        self._prompts = _Prompts(run.limits.block_size)
        self._admitted: set[int] = set()
        self._gaps: list[float] = []
        self._clock = new_clock()  # when each step ended
        self._busy_since = 0  # nanoseconds; 0: the last step left no work
        # What steps took: without prompts, and with some.
        self._taken: tuple[deque[tuple[float, Work, float]], ...] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self._acceptance = _Measured()
        self._has_predictions = False
        self._handling: tuple[list[float], list[float]] = ([], [])  # before the engine, and behind it

    def setup(self) -> Setup:
        run = self.recording.run
        self.recording.partial |= {number for number, one in self.recording.measured.items() if not one.reason}
        self.recording.handling = sum(statistics.median(each) for each in self._handling if each)
        gaps = sorted(self._gaps)[: ceil(USUAL * len(self._gaps))]
        gap = statistics.fmean(gaps) if gaps else 0.0
        limits: SchedulerLimits = run.scheduling.limits(run.limits)
        speculation = self._speculation()
        model = self._acceptance.model(speculation.num_drafts) if speculation else None
        decoding, prompts = map(self._spread, self._taken)
        pace = LearnedPace(self.recording.times, gap, decoding, prompts)
        return Setup(
            limits, run.scheduling, pace, run.depth, run.eos_token_ids,
            speculation=speculation, draft_model=model)

    def _spread(self, taken: Iterable[tuple[float, Work, float]]) -> Spread:
        return Spread.of([(began, self.recording.times.typical(work), seconds) for began, work, seconds in taken])

    def _speculation(self) -> Speculation | None:
        """The engine's, unless none of the log's requests can have drafts by it."""
        found = self.recording.run.speculation
        if found is None or (found.method == PREDICTION and not self._has_predictions):
            return None
        return None if found.method == DRAFT_MODEL and not self._acceptance.compared else found

    def feed(self, entry: event_log.Entry) -> None:
        found = self.recording
        match entry:
            case event_log.Gap():
                raise ValueError(f"{entry.missed} entries of the log are missing")
            case event_log.RequestEntry():
                found.names[entry.number] = entry.id
                found.measured[entry.number] = SimulatedRequest(entry.ns * NS, self._clock)
                found.outputs[entry.number] = []
                found.tenants[entry.number] = entry.spec.slo.tenant
                found.tiers[entry.number] = entry.spec.slo.tier
                found.commands.append((entry.ns * NS, self._arrival(entry)))
                if entry.timing.received_ns:
                    self._handling[0].append((entry.ns - entry.timing.received_ns) * NS)
            case event_log.Sent() if (first := self._first_token(entry.number)) is not None:
                self._handling[1].append(max(0.0, entry.first_ns * NS - first))
            case event_log.CommandEntry() if entry.scheduling is not None:
                found.scheduling = entry.scheduling
                found.commands.append((entry.ns * NS, Configure(entry.scheduling)))
            case event_log.CommandEntry() if entry.reason != "stop" and entry.number in found.names:
                found.commands.append((entry.ns * NS, Finish(entry.number, entry.reason)))
            case event_log.Refusal():
                found.num_refused += 1
            case StepRecord():
                self._step(entry)

    def _first_token(self, number: int) -> float | None:
        request = self.recording.measured.get(number)
        return request.first_token if request is not None else None

    def _arrival(self, entry: event_log.RequestEntry) -> Add:
        spec = entry.spec
        self._has_predictions |= bool(spec.prediction)
        self.recording.num_prompt[entry.number] = entry.num_prompt
        return Add(entry.number, replace(
            spec, prompt=spec.prompt or self._prompts.tokens(entry, self.recording.outputs),
            params=replace(spec.params, grammar=None), stop_lengths=(), kv=None), name=entry.id)

    def _keep(self, step: StepRecord) -> None:
        """Keep what a step took, unless it captured a graph."""
        work = work_of(step.plan.starts, step.plan.counts, step.plan.padding, step.plan.drafts)
        again, times = work.repeated(), self.recording.times
        if work.rows and times.typical(work) == times.typical(again):
            began = max(step.started_ns, self._busy_since)
            self._taken[work.pairs > 0].append((began * NS, again, (step.ended_ns - began) * NS))

    def _step(self, step: StepRecord) -> None:
        found = self.recording
        self._keep(step)
        found.times.stepped(step)
        self._acceptance.add(step)
        found.receives |= bool(step.inputs.arrivals or (step.inputs.disk and step.inputs.disk.arrivals))
        if self._busy_since and step.inputs.planned and step.plan.counts:
            self._gaps.append(max(0.0, (step.inputs.planned[0] - self._busy_since) * NS))
        self._busy_since = step.ended_ns if step.counters.num_running or step.counters.num_waiting else 0
        self._admitted.update(admission.request_id for admission in step.admitted)
        found.partial.update(number for number in step.plan.request_ids if number not in self._admitted)
        count_prompts(step, found.measured)
        at = len(self._clock)
        self._clock.append(step.ended_ns * NS)
        for number, tokens in zip(step.plan.request_ids, step.tokens, strict=False):
            found.outputs[number] += tokens
            for _ in tokens:
                found.measured[number].add_tokens(at, at)
        for end in step.ended:
            request = found.measured[end.request_id]
            request.ended, request.reason = step.ended_ns * NS, end.reason


class _Prompts:
    """Invents token ids for prompts known by digests of pieces: equal pieces get equal tokens, others different ones.

    A prompt that begins with all pieces of an earlier one is assumed to continue it: it repeats the rest of that prompt
    and its output.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: dict[int, tuple[int, ...]] = {}  # of a piece, by the digest at its end
        self._latest: dict[int, tuple[int, int]] = {}  # a request and its rest, by its last piece's digest

    def tokens(self, entry: event_log.RequestEntry, outputs: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
        """Returns the token ids of a request's prompt.

        Args:
            outputs: known output tokens of earlier requests.
        """
        found: list[int] = []
        before, num_rest, behind = -1, 0, 0  # the latest request that it continues, and tokens after its last piece
        ends = event_log.piece_ends(entry.num_prompt, self._block_size)
        for piece, end in zip(entry.pieces, ends, strict=False):
            size = end - len(found)
            known = self._tokens.get(piece, ())
            if len(known) != size:
                rest = [*repeat(OWN + before, num_rest), *outputs[before]] if before >= 0 else []
                repeated = rest[behind : behind + size]
                known = self._tokens[piece] = (*repeated, *repeat(PIECES + piece, size - len(repeated)))
            found += known
            behind += size
            if piece in self._latest:
                (before, num_rest), behind = self._latest[piece], 0
        rest_of_this = entry.num_prompt - len(found)
        if entry.pieces:
            self._latest[entry.pieces[-1]] = entry.number, rest_of_this
        return (*found, *repeat(OWN + entry.number, rest_of_this))


class _Measured:
    """What a log shows of its draft model."""

    def __init__(self) -> None:
        self.compared: Counter[int] = Counter()  # by position: drafts that followed right ones only
        self._right: Counter[int] = Counter()
        self._seconds = 0.0
        self._passes = 0

    def add(self, step: StepRecord) -> None:
        for number, right in step.verified if step.plan.drafts else ():
            self.compared.update(range(min(number, right + 1)))
            self._right.update(range(right))
        if step.result.proposing is not None:
            self._seconds += step.result.proposing.seconds
            self._passes += step.result.proposing.passes

    def model(self, most: int) -> SimulatedDraftModel | None:
        """Returns the draft model, with shares of `most` positions; the last that was measured stands for those behind.

        None: no draft was verified.
        """
        if not self.compared:
            return None
        shares = [self._right[position] / self.compared[position] for position in sorted(self.compared)][:most]
        shares += shares[-1:] * (most - len(shares))
        return SimulatedDraftModel(tuple(shares), self._seconds / self._passes if self._passes else 0.0)

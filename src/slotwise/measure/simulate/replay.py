"""Replays a recorded log on the serving engine itself; all inputs that the engine does not decide come from the log.

    the log                 RequestEntry, Command, taken    planned, ended_ns       sampled, failed, failure
                                       │                        │                         │
                                       ▼                        ▼                         ▼
    the engine             handle(command)  ─►  schedule  ─►  the clock   ─►  the executor  ─►  commit  ─►  record

Each record must equal the logged one, byte for byte: the plan with its slots and blocks, refused requests with their
reasons, tokens, and requests that ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from slotwise.core.interfaces import Proposer
from slotwise.core.kv_transfers import KVTransfers
from slotwise.core.params import Grammar
from slotwise.core.record import NO_STEP, CompiledGrammar, StepPlan, StepRecord, StepResult
from slotwise.core.request import Request
from slotwise.core.scheduler import Scheduler
from slotwise.core.speculation.proposer import proposer_of
from slotwise.core.step_time import StepTimeModel
from slotwise.engine.engine import Engine
from slotwise.engine.kv_link import KVLink, News
from slotwise.engine.messages import Command, Configure, Finish
from slotwise.engine.record_codec import OF_EXECUTOR
from slotwise.observe import event_log
from slotwise.observe.last_format import merged

AROUND = 200  # bytes shown of a field on each side of its first difference


class ReplayError(ValueError):
    """The log lacks entries that a replay needs; the message is one line for a person."""


class Difference(NamedTuple):
    """The first field that differs from the log."""

    record: int  # index of the Step entry in the log, from 0
    step: int
    field: str
    logged: str  # the field as in the log; of a long one, the part around the first difference
    replayed: str


class Outcome(NamedTuple):
    engines: int
    requests: int
    records: int  # equal to the logged ones
    steps: int  # those of the records that have rows
    tokens: int  # computed by those steps
    difference: Difference | None


def replay(entries: Iterable[event_log.Entry], proposer: Proposer | None = None) -> Outcome:
    """Replays a log to its end, or to the first difference.

    Args:
        proposer: proposes drafts as the recorded engines' did, where the log does not say.

    Raises:
        ReplayError: entries are missing.
    """
    player = _Player(proposer)
    for entry in entries:
        player.feed(entry)
        if player.difference is not None:
            break
    return player.outcome()


class _Player:
    def __init__(self, proposer: Proposer | None) -> None:
        self.difference: Difference | None = None
        self._proposer = proposer
        self._engine_run: _EngineRun | None = None  # of the current engine
        self._engines = self._records = self._steps = self._tokens = 0
        self._num_requests = 0

    def outcome(self) -> Outcome:
        return Outcome(
            self._engines, self._num_requests, self._records, self._steps, self._tokens, self.difference)

    def feed(self, entry: event_log.Entry) -> None:
        match entry:
            case event_log.Run():
                self._engines += 1
                self._engine_run = _EngineRun(entry, self._proposer)
            case event_log.Gap():
                raise ReplayError(f"{entry.missed} entries are missing behind record {self._records}")
            case event_log.EngineLost():
                self._engine_run = None  # the API process wrote the records that follow
            case event_log.RequestEntry():
                self._num_requests += 1
                if len(entry.spec.prompt) != entry.num_prompt:
                    raise ReplayError("the log has no prompts: only one that was written to a file can be replayed")
                self._current_run().commands.append(entry.add)
            case event_log.CommandEntry():
                self._current_run().commands.append(self._command(entry))
            case StepRecord() if self._engine_run is not None:
                self._compare(entry, self._engine_run.play(entry))

    def _current_run(self) -> _EngineRun:
        if self._engine_run is None:
            raise ReplayError("the log does not begin with an engine's start: was it saved from a stream?")
        return self._engine_run

    @staticmethod
    def _command(entry: event_log.CommandEntry) -> Command:
        if entry.scheduling is not None:
            return Configure(entry.scheduling)
        return Finish(entry.number, entry.reason)

    def _compare(self, logged: StepRecord, replayed: StepRecord | None) -> None:
        if replayed is None:
            self.difference = Difference(self._records, logged.step, "record", "something happened", "nothing did")
            return
        if event_log.encode(logged) != event_log.encode(replayed):
            field, *columns = next(
                (field, one, other) for (field, one), (_, other) in zip(_columns(logged), _columns(replayed),
                                                                        strict=False)
                if one != other)
            self.difference = Difference(
                self._records, logged.step, field, *_around_difference(*map(msgspec.json.encode, columns)))
        else:
            self._records += 1
            self._steps += bool(logged.plan.counts)
            self._tokens += sum(logged.plan.counts)


def _columns(record: StepRecord) -> Iterator[tuple[str, Any]]:
    """Yields the columns of a record, with their names."""
    yield "started_ns", record.started_ns
    yield "ended_ns", record.ended_ns
    yield "plans", len(record.plans)
    parts: list[tuple[str, Any]] = [("plan", plan) for plan in record.plans]
    parts += zip(("result", "outcome", "inputs", "counters"), record[3:], strict=True)
    for name, part in parts:
        for column, value in zip(part._fields, part, strict=True):
            if column not in OF_EXECUTOR:
                yield f"{name}.{column}", value


def _around_difference(one: bytes, other: bytes) -> tuple[str, str]:
    """Returns two texts, each cut to at most `AROUND` bytes on both sides of their first difference."""
    same, most = 0, min(len(one), len(other))  # bytes known to be equal; most that can be
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    begin, end = max(0, same - AROUND), same + AROUND
    first, second = ["... " * (begin > 0) + text[begin:end].decode(errors="replace") + " ..." * (end < len(text))
                     for text in (one, other)]
    return first, second


class _EngineRun:
    """The replay of one engine, from its start."""

    def __init__(self, run: event_log.Run, proposer: Proposer | None) -> None:
        self.commands: deque[Command] = deque()  # sent, not yet handled
        self._is_last_format = run.format == event_log.LAST_FORMAT
        self._executor = _Recorded()
        self._grammars = _RecordedGrammars()
        self._link = _RecordedLink()
        times = StepTimeModel(run.learned)
        proposer = proposer or proposer_of(run.speculation, times)
        scheduler = Scheduler(run.limits, run.scheduling.discipline(), run.scheduling.policy(times), times, proposer)
        scheduler.kv.renews_prefixes = not self._is_last_format
        self._engine = Engine(
            scheduler, self._executor, self._executor.clock, run.eos_token_ids, depth=run.depth,
            scheduling=run.scheduling, grammars=self._grammars, kv_link=self._link)

    def play(self, logged: StepRecord) -> StepRecord | None:
        """Returns the replayed record for `logged`.

        Raises:
            ReplayError: the record handled a command that is not in the log.
        """
        inputs = logged.inputs
        for handled in inputs.handled:
            if not self.commands:
                raise ReplayError(f"step {logged.step} handled a command that is not in the log")
            self._executor.now = handled
            self._engine.handle(self.commands.popleft())
        self._executor.expect(logged)
        self._grammars.compiled = list(inputs.compiled)
        self._link.news = News(inputs.arrivals, inputs.acknowledged, inputs.disk)
        has_step = logged.step != NO_STEP or bool(inputs.planned) or bool(logged.outcome.failure)
        record = self._engine.step() if has_step else self._engine.idle_record()
        if record is None:
            return None
        return merged(record.logged()) if self._is_last_format else record.logged()


class _RecordedGrammars:
    """Compiles nothing, and returns what is logged of each record."""

    is_compiling = has_compiled = True

    def __init__(self) -> None:
        self.compiled: list[CompiledGrammar] = []

    def compile(self, request_id: int, grammar: Grammar) -> None: ...

    def pop_compiled(self) -> list[CompiledGrammar]:
        compiled, self.compiled = self.compiled, []
        return compiled

    def release(self, request_id: int) -> None: ...


class _RecordedLink(KVLink):
    """Sends and receives nothing, and tells what is logged of each record."""

    has_news = True

    def __init__(self) -> None:
        self.news = News()

    def pop_news(self) -> News:
        news, self.news = self.news, News()
        return news

    def offer(self, request: Request) -> None: ...

    def follow(self, transfers: KVTransfers, unwanted: Sequence[Request]) -> None: ...

    def begin(self, transfers: KVTransfers) -> None: ...


class _Recorded:
    """An executor and a clock that return the logged results and readings."""

    def __init__(self) -> None:
        self.now = 0  # nanoseconds
        self._logged = StepRecord(0, 0)
        self._readings: deque[int] = deque()  # the clock's next values
        self._plans: deque[StepPlan] = deque()

    def clock(self) -> int:
        return self.now

    def expect(self, logged: StepRecord) -> None:
        """Sets the record to be replayed next."""
        self._logged = logged
        self._readings = deque([*logged.inputs.planned, logged.ended_ns])
        self.now = self._readings.popleft()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if self._readings:
            self.now = self._readings.popleft()

    def collect(self) -> StepResult:
        plan, logged = self._plans.popleft(), self._logged
        self.now = logged.ended_ns
        if logged.outcome.failure:
            name, _, message = logged.outcome.failure.partition(": ")
            raise type(name, (Exception,), {})(message)
        if plan.request_ids != logged.plan.request_ids or len(logged.result.tokens) != plan.num_rows:
            return StepResult(plan.step, tuple([(0,) if wanted else () for wanted in plan.num_logits]))  # diverged
        named = (logged.plan.drafts or ((),) * plan.num_rows) if plan.has_proposed else ()
        return logged.result._replace(step=plan.step, drafts=named)

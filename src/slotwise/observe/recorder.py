"""Writes the event log of an engine service: to a ring, to its readers, and to a file if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from slotwise.core.step import RowKind
from slotwise.engine.messages import Add, Command, EngineInfo, Finish, Observer, StepRecord
from slotwise.observe import event_log
from slotwise.observe.event_log import Entry, line_of
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.log_format import FORMAT
from slotwise.observe.ring import Ring
from slotwise.version import __version__


class File(Protocol):
    def write(self, line: bytes) -> None:
        """Never waits."""
        ...


class Reader(Protocol):
    def write(self, entry: Entry, changes: Changes) -> None:
        """Reads an entry, and what it changed in the recorder's timelines.  Never waits."""
        ...


class Recorder(Observer):
    """Converts the events of an engine service to entries of the log.

    Args:
        clock: monotonic nanoseconds.
        calendar: seconds since 1970.
    """

    def __init__(self, ring: Ring | None = None, clock: Callable[[], int] = time.monotonic_ns,
                 calendar: Callable[[], float] = time.time) -> None:
        self.ring = ring if ring is not None else Ring()
        self._clock = clock
        self._calendar = calendar
        self._file: File | None = None
        self._readers: list[Reader] = []
        self._run: event_log.Run | None = None

    def write_to(self, file: File) -> None:
        """Also writes to `file` from now on, prompts included."""
        self._file = file
        if self._run is not None:
            file.write(line_of(self._run))

    def add_reader(self, reader: Reader) -> None:
        """Also passes entries to `reader` from now on: those of the ring, without prompts."""
        self._readers.append(reader)
        if self._run is not None:
            reader.write(self._run, Changes())

    @property
    def timelines(self) -> Timelines:
        return self.ring.timelines

    # -- observing -----------------------------------------------------------------------------------------------

    def started(self, info: EngineInfo) -> None:
        self._run = event_log.Run(
            FORMAT, __version__, info.model, info.dtype, info.device, self._calendar(),
            self._clock(), info.limits, info.scheduling, info.eos_token_ids, info.depth, info.learned,
            info.speculation)
        self._write(self._run)

    def refused(self, kind: str) -> None:
        self._write(event_log.Refusal(self._clock(), kind))

    def commanded(self, command: Command, now_ns: int) -> None:
        if isinstance(command, Add):
            self._asked(command, now_ns)
        elif isinstance(command, Finish):
            self._write(event_log.Command(now_ns, command.request_id, command.reason))
        else:
            self._write(event_log.Command(now_ns, scheduling=command.scheduling))

    def stepped(self, record: StepRecord) -> None:
        self._write(step_entry(record))

    def lost(self, message: str, now_ns: int) -> None:
        self._write(event_log.Engine(now_ns, event_log.LOST, message))

    def sent(self, request_id: int, first_ns: int, last_ns: int, num_events: int) -> None:
        self._write(event_log.Sent(request_id, first_ns, last_ns, num_events))

    # -- writing -------------------------------------------------------------------------------------------------

    def _asked(self, request: Add, now_ns: int) -> None:
        entry = event_log.RequestEntry(now_ns, len(request.spec.prompt), request)
        if self._file is not None:
            self._file.write(line_of(entry))
        entry = entry.replace_spec(request.spec.without_texts())
        self._show(entry, line_of(entry))

    def _write(self, entry: Entry) -> None:
        line = line_of(entry)
        if self._file is not None:
            self._file.write(line)
        self._show(entry, line)

    def _show(self, entry: Entry, line: bytes) -> None:
        changes = self.ring.append(entry, line)
        for reader in self._readers:
            reader.write(entry, changes)


def step_entry(record: StepRecord) -> event_log.Step:
    """Returns the log entry of `record`."""
    entry = event_log.Step(
        record.step, record.started_ns, record.ended_ns, record.planned, record.taken,
        record.request_ids, record.slots, record.starts, record.counts,
        record.padding, record.held, record.token_ids, record.sampled, record.failed)
    _set_rare_fields(entry, record)
    entry.prefills = tuple([row for row, kind in enumerate(record.kinds) if kind is RowKind.PREFILL])
    entry.drafts, entry.freed_blocks, entry.draft_limit = record.drafts, record.freed_blocks, record.draft_limit
    entry.released_slots, entry.proposing = record.released_slots, record.proposing
    entry.new_blocks = tuple([event_log.NewBlocks(slot, blocks, group) for slot, group, blocks in record.new_blocks])
    entry.saves, entry.loads, entry.expired_blocks = record.saves, record.loads, record.expired_blocks
    entry.configured, entry.failure = record.configured, record.failure
    entry.num_running, entry.num_waiting = record.num_running, record.num_waiting
    entry.num_free_blocks = record.num_free_blocks
    return entry


def _set_rare_fields(entry: event_log.Step, record: StepRecord) -> None:
    """Sets the fields that are empty in most steps."""
    if record.admitted:
        entry.admitted = tuple([
            event_log.Admission(name, cached)
            for name, cached in zip(record.admitted, record.cached, strict=True)])
    if record.preempted:
        entry.preempted = tuple([
            event_log.Preemption(name, reason, lost)
            for (name, reason), lost in zip(record.preempted, record.lost, strict=True)])
    if record.refused:
        entry.refused = tuple([event_log.Refused(name, reason) for name, reason in record.refused])
    if (stop := record.stop) is not None:
        reopens_at = None if stop.reopens_at == float("inf") else stop.reopens_at
        entry.stop = event_log.Stop(stop.reason, stop.first_blocked, stop.num_behind, reopens_at)
    entry.forced, entry.ranks = record.forced, record.ranks
    if record.compiled:
        entry.compiled = tuple([event_log.Compiled(name, objection) for name, objection in record.compiled])
    if record.arrivals:
        entry.arrivals = tuple([event_log.Arrival(arrival.request_id, *arrival[1:])
                                for arrival in record.arrivals])
    entry.acknowledged = record.acknowledged
    if record.ended:
        entry.ended = tuple([
            event_log.End(end.request_id, end.reason, end.num_output, end.message) for end in record.ended])

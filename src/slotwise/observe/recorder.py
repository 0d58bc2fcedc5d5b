"""Writes the event log of an engine service: to a ring, to its readers, and to a file if there is one."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from secrets import token_bytes
from typing import Protocol

from slotwise.core.record import StepRecord
from slotwise.core.request import RequestSpec
from slotwise.engine.messages import Add, Command, EngineInfo, Finish, Observer
from slotwise.observe import event_log
from slotwise.observe.event_log import Entry, line_of
from slotwise.observe.fold import Changes, Timelines
from slotwise.observe.ring import Ring
from slotwise.version import __version__

DIGEST, KEY = 6, 32  # bytes


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
        self._key = token_bytes(KEY)

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
            event_log.FORMAT, __version__, info.model, info.dtype, info.device, self._calendar(),
            self._clock(), info.limits, info.scheduling, info.eos_token_ids, info.depth, info.learned,
            info.speculation)
        self._write(self._run)

    def refused(self, kind: str) -> None:
        self._write(event_log.Refusal(self._clock(), kind))

    def commanded(self, command: Command, now_ns: int) -> None:
        if isinstance(command, Add):
            self._asked(command, now_ns)
        elif isinstance(command, Finish):
            self._write(event_log.CommandEntry(now_ns, command.request_id, command.reason))
        else:
            self._write(event_log.CommandEntry(now_ns, scheduling=command.scheduling))

    def stepped(self, record: StepRecord) -> None:
        self._write(record.logged())

    def lost(self, message: str, now_ns: int) -> None:
        self._write(event_log.EngineLost(now_ns, event_log.LOST, message))

    def sent(self, request_id: int, first_ns: int, last_ns: int, num_events: int) -> None:
        self._write(event_log.Sent(request_id, first_ns, last_ns, num_events))

    # -- writing -------------------------------------------------------------------------------------------------

    def _asked(self, request: Add, now_ns: int) -> None:
        entry = event_log.RequestEntry(now_ns, len(request.spec.prompt), request)
        if self._file is not None:
            self._file.write(line_of(entry))
        pieces = self._pieces(request.spec)
        entry = event_log.RequestEntry(
            now_ns, entry.num_prompt, Add(entry.number, request.spec.without_texts(), entry.timing, entry.id), pieces)
        self._show(entry, line_of(entry))

    def _pieces(self, spec: RequestSpec) -> tuple[int, ...]:
        """Returns a digest of the prompt up to the end of each piece, under a key that no log contains.

        Empty without a prefix cache: a replay of the ring then need not know which prompts share a prefix.
        """
        if self._run is None or not self._run.limits.enable_prefix_caching:
            return ()
        running, found, start = blake2b(spec.salt.encode(), digest_size=DIGEST, key=self._key), [], 0
        for end in event_log.piece_ends(len(spec.prompt), self._run.limits.block_size):
            running.update(array("q", spec.prompt[start:end]).tobytes())
            found.append(int.from_bytes(running.digest()))
            start = end
        return tuple(found)

    def _write(self, entry: Entry) -> None:
        line = line_of(entry)
        if self._file is not None:
            self._file.write(line)
        self._show(entry, line)

    def _show(self, entry: Entry, line: bytes) -> None:
        changes = self.ring.append(entry, line)
        for reader in self._readers:
            reader.write(entry, changes)

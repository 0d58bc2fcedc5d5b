"""Simulated servers behind a router of `slotwise.core.routing`, which knows of them what a front door would.

    arrival ──► events up to then (first outputs, ends, reports) ──► Fleet.route ──► a server
                       ▲
    records ──► first outputs and ends, when they are; index and load, at the next multiple of `POLL`

A prompt's pieces are its cache blocks.  Every server has every adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import ceil

from slotwise.core.record import StepRecord
from slotwise.core.routing.fleet import Fleet, Shed
from slotwise.core.routing.prompt import RoutedRequest
from slotwise.core.routing.replica import Report, prefill_rate
from slotwise.core.routing.routers import Router
from slotwise.core.scheduler_limits import SchedulerLimits
from slotwise.engine.admission_control import AdmissionControl
from slotwise.engine.messages import Add, Command, EngineInfo, Observer
from slotwise.measure.simulate.pace import Pace
from slotwise.observe.prefix_index import PrefixIndex

POLL = 0.5  # seconds between two reports of a server
NS = 1e-9
NEVER_SHED = 1e18  # seconds

Event = Callable[[], object]


class RoutedServers:
    """What the router in front of `number` servers of a pace knows; observe each with its `observers`."""

    def __init__(self, router: Router, number: int, pace: Pace) -> None:
        self._fleet = Fleet(router, NEVER_SHED)
        self._events: list[tuple[float, int, Event]] = []  # a heap: what the router is told, and when
        self._order = count()
        self.pace = pace
        self.adapters: tuple[str, ...] = ()  # of the requests so far
        self.observers = [_ServerObserver(self, str(index)) for index in range(number)]
        for told in self.observers:
            self._fleet.add(told.name)

    def choose(self, at: float, command: Add) -> int:
        """Returns the server of a request that arrives at `at`, in seconds."""
        self.tell(at)
        size, length = self.observers[0].block_size, len(command.spec.prompt)
        adapter = self._adapter(command.spec.adapter, at)
        pieces = tuple(pieces_of(command.spec.prompt, size, f"{command.spec.salt}\0{adapter}"))
        found = self._fleet.route(RoutedRequest(str(command.request_id), length, pieces, size, adapter=adapter), at)
        assert not isinstance(found, Shed), "no server is ever lost"
        told = self.observers[int(found.name)]
        told.without_output.add(command.request_id)
        told.index.expect(command.request_id, (length, pieces), length, size)
        return int(found.name)

    def _adapter(self, number: int, at: float) -> str:
        """The name of an adapter, which all servers have; "": none."""
        if not number:
            return ""
        if (name := str(number)) not in self.adapters:
            self.adapters += (name,)
            for told in self.observers:
                self._fleet.set_adapters(told.name, self.adapters, at)
        return name

    def tell(self, at: float) -> None:
        """Tells the router what it knows at `at`, in seconds."""
        while self._events and self._events[0][0] <= at:
            heappop(self._events)[2]()

    def refused(self, request_id: int) -> None:
        """The server of a request has not accepted it."""
        self._fleet.finished(str(request_id))

    def later(self, at: float, event: Event) -> None:
        heappush(self._events, (at, next(self._order), event))

    @property
    def fleet(self) -> Fleet:
        return self._fleet


class _ServerObserver(Observer):
    """Tells the router of one server."""

    def __init__(self, routed: RoutedServers, name: str) -> None:
        self.name = name
        self.index = PrefixIndex(name)
        self.block_size = 1
        self.without_output: set[int] = set()
        self._routed = routed
        self._limits: SchedulerLimits
        self._admission: AdmissionControl  # measures how many requests start a second
        self._version = 0
        self._due = -1.0  # the last multiple of POLL with a report

    def started(self, info: EngineInfo) -> None:
        self.index.started(info)
        self._limits, self._admission = info.limits, AdmissionControl(info.limits)
        self.block_size = info.limits.block_size
        self._routed.fleet.update(self.name, self._reported(0, 0), 0.0)

    def commanded(self, command: Command, now_ns: int) -> None:
        self._admission.commanded(command, now_ns)

    def stepped(self, record: StepRecord) -> None:
        self.index.stepped(record)
        self._admission.stepped(record)
        now, fleet = record.ended_ns * NS, self._routed.fleet
        if self.without_output:
            for request_id, tokens in zip(record.plan.request_ids, record.tokens, strict=False):
                if tokens and request_id in self.without_output:
                    self.without_output.discard(request_id)
                    self._routed.later(now, partial(fleet.first_output, str(request_id), now))
        for end in record.ended:
            self.without_output.discard(end.request_id)
            self._routed.later(now, partial(fleet.finished, str(end.request_id)))
        due = ceil(now / POLL) * POLL
        if due > self._due:
            self._due = due
            report = self._reported(record.counters.num_running, record.counters.num_waiting)
            self._routed.later(due, partial(self._report, report, due))

    def _reported(self, num_running: int, num_waiting: int) -> Report:
        limits = self._limits
        return Report(
            limits.max_num_seqs, limits.max_num_batched_tokens, num_running, num_waiting,
            self._admission.drain_rate,
            prefill_rate(self._routed.pace.predicted, limits.max_num_batched_tokens, num_running),
            max_loras=limits.max_loras)

    def _report(self, report: Report, due: float) -> None:
        changes = self.index.changes(self.name, self._version)
        self._version = changes.version
        fleet = self._routed.fleet
        fleet.update_cache(self.name, changes.added, changes.removed, is_whole=changes.is_whole)
        fleet.update(self.name, replace(report, adapters=self._routed.adapters), due)


def pieces_of(prompt: Sequence[int], size: int, salt: str) -> list[int]:
    """Returns the digests of a prompt's whole blocks of `size` tokens, each of all tokens up to its end."""
    found: list[int] = []
    before = hash((len(salt), *salt.encode()))
    for end in range(size, len(prompt) + 1, size):
        before = hash((before, *prompt[end - size : end]))
        found.append(before)
    return found

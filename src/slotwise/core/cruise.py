"""Rows that cruise: they decode, a token at every step, and until their block is full there is nothing to decide.

A thousand requests are a thousand objects scattered over memory, and looking at one costs more than all that is done
with it.  So a row that cruises is not looked at: a plan moves a column of starts on by one, a commit appends a column
of tokens, and only those whose *call* has come are asked for again.

    step         1   2   3   4   5   6   7   8
    request a    d   d   ◆   d   d   d   d   ◆     ◆ its block is full after this step: it is given the next one
    request b    d   ◆   d   d   d   d   ◆   d
    request c    p   d   d   d   d   d   e         p, e: its prompt and its last token are planned one by one

This is possible because a request keeps how far it lags behind and not how far it has come (`core/request.py`): each
step adds a known token, schedules one and computes one, so of a row that decodes nothing changes but its tokens.  Those
that are about to be sampled are as many as there are steps in flight, for it stands in all of them.

Whoever is looked at meanwhile, by a policy or because it ends, yields or is aborted, shows the same numbers as any
other request.  Where rows may have to rest nobody cruises.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from slotwise.core.flight import Flight, Leg, Lineup
from slotwise.core.request import Request


class Cruise:
    """In the order of their slots, so that one is found by bisection.

    Args:
        flights: the steps in flight, oldest first.
    """

    def __init__(self, flights: deque[Flight]) -> None:
        self._flights = flights
        self._columns: tuple[list[Any], ...] = tuple([] for _ in Lineup._fields)
        self._slots: list[int] = self._columns[Lineup._fields.index("slots")]
        self._starts: list[int] = []  # of the next step
        self._lineup: Lineup | None = Lineup()  # None: somebody came or went
        self._full: list[Request] = []  # in the next step
        self._calls: defaultdict[int, dict[str, Request]] = defaultdict(dict)  # by step, counted from the first
        self._steps = 0
        self._stops: Counter[int] = Counter()  # tokens that end somebody

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def in_flight(self) -> int:
        """Steps that are planned and not committed."""
        return len(self._flights)

    @property
    def starts(self) -> Sequence[int]:
        """Where each row goes on in the next step."""
        return self._starts

    # -- coming and going ----------------------------------------------------------------------------------------

    def may_take(self, request: Request) -> bool:
        """It decodes, was given a token in all that is in flight, and need not be called before the next step."""
        return (not request.reason and request.unscheduled == request.uncomputed == 1
                and request.pending == self.in_flight and request.num_known < min(request.room, request.end - 1))

    def take(self, request: Request) -> None:
        """From the next step on; the caller has asked `may_take`."""
        row = bisect_left(self._slots, request.slot)
        self._starts.insert(row, request.num_scheduled)
        line = (request, request.request_id, request.slot, request.epoch, request.tokens)
        for column, value in zip(self._columns, line, strict=True):
            column.insert(row, value)
        self._lineup = None
        self._stops.update(request.stop_ids)
        self._calls[self._call(request)][request.request_id] = request
        request.cruise = self

    def drop(self, request: Request) -> None:
        """Look at it again at every step.  One that does not cruise is left alone."""
        if request.cruise is None:
            return
        row = bisect_left(self._slots, request.slot)
        for column in (self._starts, *self._columns):
            del column[row]
        self._lineup = None
        self._stops -= Counter(request.stop_ids)  # keeps what is above zero
        del self._calls[self._call(request)][request.request_id]
        for flight in self._flights:
            flight.leg.gone.append(request.slot)
        request.awaited = self.in_flight
        request.cruise = None

    def dissolve(self) -> None:
        """Drop everyone."""
        for flight in self._flights:
            flight.leg.gone.extend(self._slots)
        for request in self._columns[0]:
            request.awaited = self.in_flight
            request.cruise = None
        for column in self._columns:
            column.clear()
        self._starts.clear()
        self._full.clear()
        self._lineup = None
        self._stops.clear()
        self._calls.clear()

    # -- calls ---------------------------------------------------------------------------------------------------

    def _call(self, request: Request) -> int:
        """The step that fills its blocks, or schedules the token before its last."""
        return self._steps + min(request.room, request.end - 1) - request.num_known

    def called(self) -> list[Request]:
        """Those who must be dropped or given room before the next step."""
        return list(self._calls.get(self._steps, {}).values())

    def go_on(self, request: Request) -> None:
        """One that was called has room for more; what it had is full after the next step."""
        del self._calls[self._steps][request.request_id]
        self._calls[self._call(request)][request.request_id] = request
        self._full.append(request)

    # -- steps ---------------------------------------------------------------------------------------------------

    def depart(self) -> Leg:
        """Everyone's part of the step that is planned now."""
        if self._lineup is None:
            self._lineup = Lineup(*map(tuple, self._columns))
        leg = Leg(self._lineup, tuple(self._starts), tuple(self._full), [])
        self._starts = [start + 1 for start in self._starts]
        self._full = []
        self._calls.pop(self._steps, None)
        self._steps += 1
        return leg

    def arrive(self, flight: Flight, sampled: Sequence[tuple[int, ...]]) -> Sequence[int]:
        """Append the tokens of the oldest step in flight: the rows of it that are left to be looked at.

        Those are the rows that did not cruise when it was planned, or do not any more, or end with this token.
        """
        lineup = flight.leg.lineup
        num_rows = len(lineup.requests)
        ours = sampled if num_rows == len(sampled) else sampled[:num_rows]
        try:
            tokens = [token for (token,) in ours]
        except ValueError:  # somebody's was not sampled, or there are more of them
            self.dissolve()
            return range(len(sampled))
        for request, some in zip(flight.others.requests, sampled[num_rows:], strict=True):
            if len(some) != 1:
                self.drop(request)  # it began to cruise in a step after this
        apart = self._apart(flight.leg, tokens)
        grow: Sequence[list[int]] = lineup.tokens
        if apart:
            grow = list(grow)
            for row in apart:
                grow[row] = []  # not its own
        deque(map(list.append, grow, tokens), maxlen=0)  # each to its own, without a step of the interpreter
        return [*apart, *range(num_rows, len(sampled))]

    def _apart(self, leg: Leg, tokens: Sequence[int]) -> list[int]:
        """Rows that cruise no more, and those that one of these tokens ends."""
        requests, _, slots, _, _ = leg.lineup
        rows = [bisect_left(slots, slot) for slot in leg.gone]
        apart = {row for row, slot in zip(rows, leg.gone, strict=True) if slots[row : row + 1] == (slot,)}
        if not self._stops.keys().isdisjoint(tokens):
            apart.update([row for row, token in enumerate(tokens) if token in requests[row].stop_ids])
        return sorted(apart)

    def check(self) -> None:
        """Raises AssertionError where a row is not what a decoding row is."""
        assert self._slots == sorted(self._slots) and len({len(self), *map(len, self._columns)}) == 1
        assert sum(map(len, self._calls.values())) == len(self)
        for request, slot, start in zip(self._columns[0], self._slots, self._starts, strict=True):
            assert request.cruise is self and not request.reason and request.slot == slot, request
            assert request.unscheduled == request.uncomputed == 1 and request.num_scheduled == start, request
            assert self._calls[self._call(request)][request.request_id] is request, request

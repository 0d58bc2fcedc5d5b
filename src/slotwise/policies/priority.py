"""Priority: lower numbers go first, and may take the places of those who run; waiting makes up for any difference.

A request's rank is its priority plus the moment of its arrival, measured in `ageing`s.  Ranks never change, and yet
they age: between two requests the one that came earlier gains as much as it has waited longer.  So

    nobody who comes more than `ageing` * (p - q) seconds after a request of priority p goes before it with priority q,

and since the scheduler admits in this order, nobody of a lower rank keeps one of a higher rank waiting for a slot:
there is no inversion to cure.
"""

from __future__ import annotations

from math import floor

from slotwise.core.interfaces import Key
from slotwise.core.request import Request
from slotwise.policies.fcfs import FirstComeFirstServed


class Priority(FirstComeFirstServed):
    """
    Args:
        ageing: seconds of waiting that make up for one step of priority.
        gap: steps of priority by which one that waits must be ahead of one that runs to take its place.
    """

    orders_running = True
    may_preempt = True

    def __init__(self, ageing: float, gap: int) -> None:
        self._ageing = ageing
        self._gap = gap

    def _rank(self, request: Request) -> float:
        return request.slo.priority + request.arrived_at / self._ageing

    def waiting_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def running_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def victim_key(self, request: Request, now: float) -> Key:
        return (floor(self._rank(request)), request.arrival)

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        ahead = running.slo.priority - waiting.slo.priority
        return ahead >= self._gap and self._rank(waiting) < self._rank(running)

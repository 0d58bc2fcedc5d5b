"""Priority scheduling with preemption and ageing: lower numbers go first.

A request's rank is its priority plus its arrival time divided by `ageing`.  Ranks are constant, and yet they age: of
two requests the earlier one gains by the time it has waited longer.  So

    a request of priority q precedes one of priority p only if it arrives at most `ageing` * (p - q) seconds after it,

and since the scheduler admits in this order, no request waits for a slot behind one of lower rank: there is no priority
inversion.
"""

from __future__ import annotations

from math import floor

from slotwise.core.interfaces import Key
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import Request


class Priority(FirstComeFirstServed):
    """
    Args:
        ageing: seconds of waiting that make up for one step of priority.
        gap: steps of priority by which a waiting request must be ahead of a running one to preempt it.
    """

    orders_running = True
    ranks_once = True
    may_preempt = True

    def __init__(self, ageing: float, gap: int) -> None:
        self._ageing = ageing
        self._gap = gap

    def _rank(self, request: Request) -> float:
        return request.spec.slo.priority + request.arrived_at / self._ageing

    def waiting_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def running_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def victim_key(self, request: Request, now: float) -> Key:
        return (floor(self._rank(request)), request.arrival)

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        ahead = running.spec.slo.priority - waiting.spec.slo.priority
        return ahead >= self._gap and self._rank(waiting) < self._rank(running)

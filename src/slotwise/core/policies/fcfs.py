"""First come, first served: requests run in order of arrival, and the last to arrive is preempted first.

A preempted request keeps its arrival number, so it precedes all later arrivals.  Also the base class of every other
policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.core.interfaces import NEVER, Key
from slotwise.core.request import Request


class FirstComeFirstServed:
    orders_running = False
    ranks_once = False
    may_preempt = False
    needs_step_times = False
    isolates_prefill = False

    def lane(self, request: Request) -> str:
        return ""

    def lane_key(self, lane: str, now: float) -> Key:
        return ()

    def waiting_key(self, request: Request, now: float) -> Key:
        return (request.arrival,)

    def running_key(self, request: Request, now: float) -> Key:
        return (request.arrival,)

    def victim_key(self, request: Request, now: float) -> Key:
        return (0, request.arrival)

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        return False

    def cap(self, request: Request, wanted: int, now: float) -> int:
        return wanted

    def paused(self, requests: Sequence[Request], beginning: Sequence[Request], now: float) -> frozenset[int]:
        return frozenset()

    def patience(self, request: Request, now: float) -> float:
        return NEVER

    def overdue(self, request: Request, now: float) -> str:
        return ""

    def arrived(self, request: Request, now: float) -> None:
        pass

    def admitted(self, request: Request, now: float) -> None:
        pass

    def preempted(self, request: Request, now: float) -> None:
        pass

    def served(self, requests: Sequence[Request], counts: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        pass

    def finished(self, request: Request, reason: str, now: float) -> None:
        pass

"""First come, first served: the order of arrival, and the last to arrive yields first.

A preempted request keeps its arrival number, so it stands before everyone who came after it.
"""

from __future__ import annotations

from slotwise.core.request import Request
from slotwise.core.seams import Key


class FirstComeFirstServed:
    def waiting_key(self, request: Request, now: float) -> Key:
        return (request.arrival,)

    def victim_key(self, request: Request, now: float) -> Key:
        return (request.arrival,)

"""Deadlines: who has the least slack goes first, and who can no longer be served in time does not make others late.

A request's first token is promised within an objective of its arrival, its own or its tier's.  It must have been
started by that moment less the time its prompt takes, as the model of step times predicts:

    arrival ──────────── latest start ▒▒▒ its prompt ▒▒▒ objective
                slack

The smallest latest start goes first: earliest deadline first, by slack (Liu and Layland, 1973, for one processor).
When load is more than the machine, pure deadline order makes everyone late, one after the other.  So whoever can no
longer be in time steps back behind all who can, or, where the server sheds, ends at once with a reason.  Those who
stepped back and have waited `ageing` seconds go before everybody: nobody waits for ever.
"""

from __future__ import annotations

from slotwise.core.interfaces import NEVER, Key
from slotwise.core.request import Request, State
from slotwise.core.step_time import StepTimeModel, Work
from slotwise.policies.fcfs import FirstComeFirstServed

UNDERWAY, AGED, IN_TIME, LATE = range(4)  # classes, first to last


class Deadline(FirstComeFirstServed):
    """
    Args:
        times: predicts how long prompts take; while it knows nothing they take no time.
        ttft: seconds, the objective of those that bring none.
        ageing: seconds after which one that is late goes first.
        sheds: who can no longer be in time ends with the reason `shed`.
    """

    orders_running = True
    needs_step_times = True

    def __init__(self, times: StepTimeModel, ttft: float, ageing: float, *, sheds: bool) -> None:
        self._times = times
        self._ttft = ttft
        self._ageing = ageing
        self._sheds = sheds

    def _due(self, request: Request) -> float:
        """Seconds, the moment of its objective."""
        return request.arrived_at + (request.slo.ttft or self._ttft)

    def _latest_start(self, request: Request) -> float:
        count = len(request.tokens) - request.num_computed
        alone = self._times.seconds(Work(count, 1, 0, count * (request.num_computed + (count + 1) / 2)))
        return self._due(request) - alone

    def _standing(self, request: Request, now: float) -> Key:
        if request.num_output:
            return (UNDERWAY, request.arrived_at)  # its first token came; what is promised now is its pace
        start = self._latest_start(request)
        if now < start:
            return (IN_TIME, start)
        return (LATE if now < request.arrived_at + self._ageing else AGED, request.arrived_at)

    def waiting_key(self, request: Request, now: float) -> Key:
        return self._standing(request, now)

    def running_key(self, request: Request, now: float) -> Key:
        return self._standing(request, now)

    def victim_key(self, request: Request, now: float) -> Key:
        late = not request.num_output and now >= self._due(request)
        return (LATE if late else IN_TIME, self._due(request))

    def patience(self, request: Request, now: float) -> float:
        if request.num_output:
            return NEVER
        start = self._latest_start(request)
        if self._sheds and request.state is State.WAITING:
            return max(start, now)
        moments = (start, request.arrived_at + self._ageing)
        return min((moment for moment in moments if moment > now), default=NEVER)

    def overdue(self, request: Request, now: float) -> str:
        if not self._sheds or request.state is not State.WAITING or now < self._latest_start(request):
            return ""
        objective = request.slo.ttft or self._ttft
        return f"its first token could no longer come within the {objective:g} s that it is promised"

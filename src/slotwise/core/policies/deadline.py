"""Deadline scheduling: least slack first; requests that can no longer meet their objective do not delay others.

The objective is the time to first token, the request's own or its tier's.  The latest start is the objective less the
prefill time that the step-time model predicts:

    arrival ──────────── latest start ▒▒▒ prefill ▒▒▒ objective
                slack

The smallest latest start goes first: earliest deadline first, by slack (Liu and Layland, 1973, for one processor).
Under overload, pure deadline order makes all requests late, one after the other.  So a late request goes behind all
that can still be in time, or, if the server sheds, ends at once with a reason.  A late request that has waited `ageing`
seconds goes before all others that have no token yet: no request starves.
"""

from __future__ import annotations

from slotwise.core.interfaces import NEVER, Key
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import Request, State
from slotwise.core.step_time import StepTimeModel, Work

UNDERWAY, AGED, IN_TIME, LATE = range(4)  # classes, first to last


class Deadline(FirstComeFirstServed):
    """
    Args:
        times: predicts prefill times; 0 while it is untrained.
        ttft: seconds; the objective of requests without one.
        ageing: seconds of waiting after which a late request goes first.
        sheds: late requests end with the reason `shed`.
    """

    orders_running = True
    needs_step_times = True

    def __init__(self, times: StepTimeModel, ttft: float, ageing: float, *, sheds: bool) -> None:
        self._times = times
        self._ttft = ttft
        self._ageing = ageing
        self._sheds = sheds

    def _due(self, request: Request) -> float:
        """Returns the time, in seconds, by which the first token is due."""
        return request.arrived_at + (request.spec.slo.ttft or self._ttft)

    def _latest_start(self, request: Request) -> float:
        count = len(request.tokens) - request.num_computed
        alone = self._times.seconds(Work(count, 1, 0, count * (request.num_computed + (count + 1) / 2)))
        return self._due(request) - alone

    def _standing(self, request: Request, now: float) -> Key:
        if request.num_output or request.reason:
            return (UNDERWAY, request.arrived_at)  # its first token was produced; the TPOT objective applies now
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
        objective = request.spec.slo.ttft or self._ttft
        return f"its first token could no longer come within the {objective:g} s that it is promised"

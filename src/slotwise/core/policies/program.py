"""Programs served as programs: requests of one session share attained service, and the least served session goes next.

An agent or a conversation is many requests, and its user waits for the last one.  A program that has had little service
so far will probably end soon, so newcomers and short programs go before long ones (program-level attained service:
Autellix, Luo et al., 2025).  A request without a session is a program of its own.

Service is work in tokens: prompt tokens that were computed, not those found in the cache, and output tokens, which
count `OUTPUT`.  It is counted in levels that double, so that programs of about the same service keep the order of
arrival, and what was served long ago counts less: half after each `HALF_LIFE`.

    level of a request     0        1        2        3  ...  LEVELS
    service before it      < 2,048  < 6,144  < 14,336 ...     tokens of work

A request's rank is its arrival time plus `ageing` seconds for each level.  Ranks are constant, so

    a request goes before an earlier one only if it arrives at most `ageing` * (levels that it is below) seconds later.
"""

from __future__ import annotations

from collections import OrderedDict
from math import log2

from slotwise.core.interfaces import Key
from slotwise.core.policies.fair import OUTPUT, PROMPT
from slotwise.core.policies.fcfs import FirstComeFirstServed
from slotwise.core.request import Request

QUANTUM = 2048.0  # work of the first level
LEVELS = 8
HALF_LIFE = 600.0  # seconds after which service counts half
MAX_PROGRAMS = 16_384  # sessions whose service is kept; the one without service for the longest time is dropped

Program = tuple[str, str]  # tenant, session


class LeastServedProgram(FirstComeFirstServed):
    """
    Args:
        ageing: seconds of waiting that make up for one level.
        quantum: work of the first level.
        half_life: seconds after which service counts half.
    """

    orders_running = True
    ranks_once = True

    def __init__(self, ageing: float, quantum: float = QUANTUM, half_life: float = HALF_LIFE) -> None:
        self._ageing = ageing
        self._quantum = quantum
        self._half_life = half_life
        self._service: OrderedDict[Program, tuple[float, float]] = OrderedDict()  # work, as of when; latest last
        self._levels: dict[int, int] = {}  # by unfinished request, from its arrival on

    def waiting_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def running_key(self, request: Request, now: float) -> Key:
        return (self._rank(request),)

    def victim_key(self, request: Request, now: float) -> Key:
        return (self._levels[request.request_id], request.arrival)

    def _rank(self, request: Request) -> float:
        return request.arrived_at + self._ageing * self._levels[request.request_id]

    def arrived(self, request: Request, now: float) -> None:
        work, since = self._service.get(_program(request), (0.0, now))
        self._levels[request.request_id] = min(
            LEVELS, int(log2(1 + self._decayed(work, now - since) / self._quantum)))

    def admitted(self, request: Request, now: float) -> None:
        """Charge what it computes of its tokens: after a preemption it computes some of them again."""
        self._charge(request, PROMPT * (len(request.tokens) - request.num_computed), now)

    def finished(self, request: Request, reason: str, now: float) -> None:
        self._charge(request, OUTPUT * request.num_output, now)
        self._levels.pop(request.request_id, None)

    def _charge(self, request: Request, work: float, now: float) -> None:
        if not request.spec.session or not work:
            return
        program = _program(request)
        before, since = self._service.pop(program, (0.0, now))
        self._service[program] = self._decayed(before, now - since) + work, now
        if len(self._service) > MAX_PROGRAMS:
            self._service.popitem(last=False)

    def _decayed(self, work: float, seconds: float) -> float:
        return float(work * 2.0 ** (-seconds / self._half_life))


def _program(request: Request) -> Program:
    return request.spec.slo.tenant, request.spec.session

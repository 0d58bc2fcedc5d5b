"""Open and closed loops: when the next request is sent.

An open loop sends each request at its time, whether or not others have ended: a slow server cannot slow the traffic
down, which is how users behave and what shows queues.  In a closed loop N users wait for their answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate

from slotwise.bench.measures import Outcome
from slotwise.workload.requests import Workload, WorkRequest

Prepare = Callable[[WorkRequest], bytes]
Send = Callable[[bytes, Outcome], Awaitable[None]]
Watch = Callable[[Outcome], None]
PREPARED_TOKENS = 10_000_000  # of prompts made before the start; later ones are made when they are sent


def ignore(outcome: Outcome) -> None:
    """A `Watch` that does nothing."""


class Load:
    """Sends a workload to a server.  `outcomes` holds those so far.

    Args:
        prepare: makes a request's body.
        watch: receives each outcome.
    """

    def __init__(self, workload: Workload, prepare: Prepare, watch: Watch = ignore) -> None:
        self._workload = workload
        self._prepare = prepare
        self._watch = watch
        self._start = 0.0
        self._bodies = {request.number: prepare(request) for request in _affordable(workload)}
        self.outcomes: list[Outcome] = []

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._start

    async def run(self, send: Send) -> None:
        """Run until every request has an outcome.  When cancelled, requests in progress become unfinished outcomes.

        Args:
            send: sends a body and fills the outcome; does not raise for anything a server does.
        """
        self._start = time.perf_counter()
        await (self._closed(send) if self._workload.users else self._open(send))

    async def _open(self, send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self._workload.requests:
                body = self._body(request)
                due = request.arrives_at or 0.0
                if (wait := due - self.clock()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._ask(send, body, Outcome(request.number, due=due)))

    async def _closed(self, send: Send) -> None:
        waiting = iter(self._workload.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._workload.users, len(self._workload.requests))):
                group.create_task(self._user(send, waiting))

    async def _user(self, send: Send, waiting: Iterator[WorkRequest]) -> None:
        for request in waiting:
            body = self._body(request)
            await self._ask(send, body, Outcome(request.number, due=self.clock()))

    async def _ask(self, send: Send, body: bytes, outcome: Outcome) -> None:
        try:
            await send(body, outcome)
        finally:
            self.outcomes.append(outcome)
            self._watch(outcome)

    def _body(self, request: WorkRequest) -> bytes:
        return self._bodies.pop(request.number, b"") or self._prepare(request)


def _affordable(workload: Workload) -> list[WorkRequest]:
    """The first requests, whose prompts together have at most `PREPARED_TOKENS`."""
    totals = accumulate(request.num_prompt for request in workload.requests)
    return [request for request, total in zip(workload.requests, totals, strict=True) if total <= PREPARED_TOKENS]

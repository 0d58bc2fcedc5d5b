"""Answers what-ifs: the server's own last minutes, from its ring, replayed under other scheduling settings.

A question is answered within `ANSWERED` seconds, whatever else the machine does: its latest part is replayed first,
then as much of the ring as, at that speed, the rest of the time allows.

    turn ──► the latest FIRST bytes ──► how fast? ──► as many bytes as fit ──► answer
      │ none in time     │ late                             │ late
      └──► 503           └──► 503, an estimate              └──► the first part's answer

The replay runs in a worker process, which rests between moments of work (`measure/simulate/what_if.py`) and is given
the ring's lines; this process imports no simulator.  One runs at a time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple

from slotwise.api.http.api_errors import ApiError, bad_request
from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.http.worker_process import CallError, CallLimits, CallRefused, Worker
from slotwise.api.protocol.admin_protocol import WhatIfRequest
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.ring import Overtaken, Ring

MAX_WAITING = 4
ANSWERED = 9.7  # seconds after which a question has its answer, in any case
TURN = 4.0  # of them, that it may wait for its turn
ENDS = 9.4  # after which a replay that is not done ends
WANTED, FIRST_WANTED = 8.5, 2.0  # after which it is to be done, and its first part
FIRST = 512 << 10  # bytes of the first part
USABLE = 0.8  # of the time that is left: estimates miss
LIMITS = CallLimits(seconds=2 * ANSWERED, memory=1 << 30, answer=4 << 20)
MS = 1000.0


class _LogPart(NamedTuple):
    """The replay of a part of the ring, as `measure.simulate.what_if` returns it."""

    answer: dict[str, Any] | None
    refusal: str  # why there is no answer; empty: there was no time for one, or there is one
    work: float  # seconds that it took, without rests; that it would take, if there was no time

    @property
    def is_late(self) -> bool:
        return self.answer is None and not self.refusal


class WhatIf:
    """Replays one what-if after the other, in a process apart from the streams."""

    def __init__(self, batched_observer: BatchedObserver, ring: Ring) -> None:
        self._batched_observer = batched_observer
        self._ring = ring
        self._turns = Turns(MAX_WAITING, MAX_WAITING)
        self._worker = Worker("slotwise.measure.simulate.what_if", LIMITS, Turns(0, 0))

    async def answer(self, holder: str, request: WhatIfRequest) -> dict[str, Any]:
        """Returns the answer of `measure.simulate.what_if`, with the seconds of traffic that the ring holds.

        Raises:
            ApiError: the question is refused, others come first, or there is no time for it.
        """
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ANSWERED), AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(TURN):
                        await held.enter_async_context(self._turns.turn(holder))
                except TimeoutError as error:
                    raise _busy("another one is, and others may wait", ENDS - TURN) from error
                return await self._replayed(request, asked_at)
        except TimeoutError as error:
            raise _late("the replay did not come to its end") from error
        except QueueFull as error:
            raise _busy(f"{MAX_WAITING} wait", ANSWERED) from error
        except CallRefused as error:
            raise bad_request(str(error)) from error
        except (OverflowError, UnicodeError) as error:
            raise bad_request("changes: a number beyond 64 bits, or no valid Unicode", "changes") from error
        except Overtaken as error:
            raise _busy(str(error), 1) from error
        except CallError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the what-if {error}", code="not_simulated") from error

    async def _replayed(self, request: WhatIfRequest, asked_at: float) -> dict[str, Any]:
        self._batched_observer.flush()
        size, held_seconds = self._ring.size, self._ring.seconds
        is_whole = size <= FIRST
        found = await self._replay(request, min(size, FIRST), asked_at, WANTED if is_whole else FIRST_WANTED)
        left = WANTED - (time.monotonic() - asked_at)
        fitting = FIRST * USABLE * left / found.work if found.work > 0 else 0.0
        if not is_whole and not found.is_late and fitting > FIRST:
            more = await self._replay(request, min(size, round(fitting)), asked_at, WANTED)
            is_whole = fitting >= size
            if not more.is_late or found.answer is None:
                found = more
        if found.refusal:
            of_part = "" if is_whole else " (of the latest part that could be replayed)"
            raise bad_request(found.refusal + of_part)
        if found.answer is None:
            raise _late(f"even its latest part would take about {found.work:.0f} s")
        return found.answer | {"held_seconds": max(held_seconds, found.answer["seconds"])}

    async def _replay(self, request: WhatIfRequest, size: int, asked_at: float, wanted: float) -> _LogPart:
        """Replays the latest `size` bytes of the ring."""
        limits = [None if one is None else one / MS for one in (request.ttft_ms, request.tpot_ms)]
        question = (request.changes, *limits, request.request_id or "", request.retain or {}, asked_at + wanted,
                    asked_at + ENDS)
        return _LogPart(*await self._worker.call("", "what_if", lambda: question, lambda: self._ring.pieces(size)))

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _busy(why: str, seconds: float) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"one what-if is answered at a time: {why}; try again in "
                    f"{ceil(seconds)} s", code="what_if_busy", retry_after=ceil(seconds))


def _late(why: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the machine is too busy for a what-if: {why}, and "
                    f"{ANSWERED:g} s are allowed; try again when less runs next to the server, or replay its event log "
                    "elsewhere (--event-log, `slotwise what-if`)", code="what_if_late", retry_after=ceil(ANSWERED))

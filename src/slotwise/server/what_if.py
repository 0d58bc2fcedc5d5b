"""Answers what-ifs: the server's own last minutes, from its ring, replayed under other scheduling settings.

The replay runs in a worker process of the lowest priority, which is given the ring's lines; this process imports no
simulator.  One runs at a time.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.ring import Overtaken, Ring
from slotwise.server.admin_protocol import WhatIfRequest
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.turns import QueueFull, Turns
from slotwise.server.worker import CallError, CallRefused, Worker
from slotwise.server.worker_main import Limits

MAX_WAITING = 4
# The processor's share of a process of the lowest priority is what others leave, so its time is generous.
LIMITS = Limits(seconds=120.0, memory=1 << 30, answer=4 << 20, niceness=19)
MS = 1000.0


class WhatIf:
    """Replays one question after the other, in a process beside the streams."""

    def __init__(self, batched_observer: BatchedObserver, ring: Ring) -> None:
        self._batched_observer = batched_observer
        self._ring = ring
        self._worker = Worker("slotwise.simulate.what_if", LIMITS, Turns(MAX_WAITING, MAX_WAITING))

    async def answer(self, holder: str, request: WhatIfRequest) -> dict[str, Any]:
        """Returns the answer of `simulate.what_if`.

        Raises:
            ApiError: the question is refused, too many wait, or it exceeds its limits.
        """
        limits = [None if one is None else one / MS for one in (request.ttft_ms, request.tpot_ms)]

        def arguments() -> tuple[Any, ...]:
            self._batched_observer.flush()
            return request.changes, *limits, request.request_id or ""

        try:
            found: dict[str, Any] = await self._worker.call(holder, "what_if", arguments, self._ring.pieces)
        except QueueFull as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "too many what-ifs at once; try again later",
                           code="what_if_busy", retry_after=1) from error
        except CallRefused as error:
            raise bad_request(str(error)) from error
        except (OverflowError, UnicodeError) as error:
            raise bad_request("changes: a number beyond 64 bits, or no valid Unicode", "changes") from error
        except Overtaken as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; try again", code="what_if_busy",
                           retry_after=1) from error
        except CallError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the what-if {error}", code="not_simulated") from error
        return found

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

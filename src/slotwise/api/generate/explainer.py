"""Explains requests from the ring of the event log: where their time went (see observe.explain).

The ring's index finds the requests; a worker process of low priority decodes their lines and explains them.  Clients
take turns; the number waiting is bounded per client and in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from slotwise.api.http.api_errors import ApiError
from slotwise.api.http.turns import QueueFull, Turns
from slotwise.api.http.worker_process import CallError, CallLimits, Worker
from slotwise.observe.batched_observer import BatchedObserver
from slotwise.observe.recorder import Recorder
from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_time_store import ObservedStepTimes

MOST = 16  # requests explained at once: tracing ids may repeat, and a response may have many choices
MAX_ASKING, MAX_ASKING_OF_ONE = 64, 4  # `GET /explain` waiting, of all clients and of one
MAX_WAITING, MAX_WAITING_OF_ONE = 256, 64  # with responses waiting for their field `explain`
BUSY = "explainer_busy"
RETRY_AFTER = 1  # seconds
# Lower than that of streams, but with a quarter of a processor that another program uses whole.
LIMITS = CallLimits(seconds=30.0, memory=512 << 20, answer=8 << 20, niceness=5)


class Explainer:
    """Explains one call after the other, in a process apart from the streams.

    Args:
        batched_observer: passes events to `recorder`.
        step_times: predicts the time of work that runs alone.
    """

    def __init__(self, batched_observer: BatchedObserver, recorder: Recorder, step_times: ObservedStepTimes) -> None:
        self._batched_observer = batched_observer
        self._ring = recorder.ring
        self._step_times = step_times
        self._worker = Worker("slotwise.observe.explain", LIMITS, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

    def check_capacity(self, holder: str) -> None:
        """Raises ApiError when too many are waiting."""
        turns = self._worker.turns
        if turns.waiting_of(holder) >= MAX_ASKING_OF_ONE:
            raise _busy(HTTPStatus.TOO_MANY_REQUESTS)
        if turns.num_waiting >= MAX_ASKING:
            raise _busy(HTTPStatus.SERVICE_UNAVAILABLE)

    async def named(self, holder: str, tenant: str, name: str) -> list[dict[str, Any]]:
        """Returns the explanations of a tenant's requests ("": all tenants') of this name, in order of arrival.

        Args:
            holder: the client; clients take turns.

        Raises:
            ApiError: too many are waiting, or the call exceeds its limits.
        """
        return await self._explain(holder, lambda: self._ring.named(tenant, name, MOST))

    async def of_response(self, holder: str, request_ids: Sequence[int]) -> dict[str, Any]:
        """Returns the `explain` field of a response: explanations of its requests up to now, or an error."""
        answer: dict[str, Any] = {"requests": []}
        try:
            answer["requests"] = await self._explain(
                holder, lambda: self._ring.numbered(request_ids, MOST))
        except ApiError as error:  # the response itself is complete
            answer["error"] = error.content()
        return {"explain": answer | {"step_time_model": self.trust}}

    @property
    def trust(self) -> dict[str, Any]:
        """How far predictions of the time a request would have taken alone can be trusted."""
        return {"median_error": round(self._step_times.error, 4), "steps": self._step_times.num_steps}

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    async def _explain(self, holder: str, find: Callable[[], list[RequestTimeline]]) -> list[dict[str, Any]]:
        until_ns = time.monotonic_ns()
        self._batched_observer.flush()
        if not find():
            return []

        def arguments() -> tuple[Any, ...]:
            self._batched_observer.flush()
            return (*self._ring.extract(find()), self._step_times.prediction(), until_ns)

        try:
            explanations: list[dict[str, Any]] = await self._worker.call(holder, "explain", arguments)
        except QueueFull as error:
            raise _busy(HTTPStatus.TOO_MANY_REQUESTS if error.of_one else HTTPStatus.SERVICE_UNAVAILABLE) from error
        except CallError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the explanation {error}", code="not_explained") from error
        return explanations


def _busy(status: HTTPStatus) -> ApiError:
    return ApiError(status, "too many explanations at once; try again later", code=BUSY, retry_after=RETRY_AFTER)

"""`GET /explain/{request_id}` and the field `explain`: where a request's time went (see observe.explain).

The ring's index finds the requests; a worker process of low priority decodes their lines and explains them.  Clients
take turns; the number waiting is bounded per client and in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from slotwise.observe.request_timeline import RequestTimeline
from slotwise.observe.step_time import StepTimeModel
from slotwise.server.errors import ApiError
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.turns import QueueFull, Turns
from slotwise.server.worker import CallError, Limits, Worker

if TYPE_CHECKING:
    from slotwise.server.generate import Api

MOST = 16  # requests explained at once: tracing ids may repeat, and a response may have many choices
MAX_ASKING, MAX_ASKING_OF_ONE = 64, 4  # `GET /explain` waiting, of all clients and of one
MAX_WAITING, MAX_WAITING_OF_ONE = 256, 64  # with responses waiting for their field `explain`
BUSY = "explainer_busy"
RETRY_AFTER = 1  # seconds
# The processor's share of a process of the lowest priority is what others leave, so its time is generous.
LIMITS = Limits(seconds=30.0, memory=512 << 20, answer=8 << 20, niceness=19)


class Explainer:
    """Explains one call after the other, in a process beside the streams."""

    def __init__(self) -> None:
        self._worker = Worker("slotwise.observe.explaining", LIMITS, Turns(MAX_WAITING, MAX_WAITING_OF_ONE))

    def check_room(self, holder: str) -> None:
        """Raises ApiError when too many are waiting."""
        turns = self._worker.turns
        if turns.waiting_of(holder) >= MAX_ASKING_OF_ONE:
            raise _busy(HTTPStatus.TOO_MANY_REQUESTS)
        if turns.num_waiting >= MAX_ASKING:
            raise _busy(HTTPStatus.SERVICE_UNAVAILABLE)

    async def explain(self, api: Api, holder: str, find: Callable[[], list[RequestTimeline]]) -> list[dict[str, Any]]:
        """The timelines of the requests that `find` finds, in order of arrival.

        Args:
            holder: the client; clients take turns.

        Raises:
            ApiError: too many are waiting, or the call exceeds its limits.
        """
        until_ns = time.monotonic_ns()
        api.batched_observer.flush()
        if not find():
            return []

        def arguments() -> tuple[Any, ...]:
            api.batched_observer.flush()
            return (*api.recorder.ring.extract(find()), api.step_times.prediction(), until_ns)

        try:
            told: list[dict[str, Any]] = await self._worker.call(holder, "explain", arguments)
        except QueueFull as error:
            raise _busy(HTTPStatus.TOO_MANY_REQUESTS if error.of_one else HTTPStatus.SERVICE_UNAVAILABLE) from error
        except CallError as error:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the explanation {error}", code="not_explained") from error
        return told

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _busy(status: HTTPStatus) -> ApiError:
    return ApiError(status, "too many explanations at once; try again later", code=BUSY, retry_after=RETRY_AFTER)


async def of_request(api: Api, exchange: HttpExchange) -> None:
    """Where the time of a request went, by its `X-Request-Id` or the `id` of its response."""
    api.quotas.count_request(api.account(exchange))
    api.explainer.check_room(exchange.holder)
    name, scope = exchange.scope["path_params"]["request_id"], api.keys.scope_of(exchange.tenant)
    told = await api.explainer.explain(api, exchange.holder, lambda: api.recorder.ring.named(scope, name, MOST))
    if not told:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is remembered whole", "request_id",
                       "request_not_found")
    await exchange.respond_json({"object": "explanation", "requests": told, "step_time_model": told_of(api.step_times)})


async def of_response(api: Api, holder: str, request_ids: Sequence[str]) -> dict[str, Any]:
    """The `explain` field of a response: the timelines of its requests up to now, or an error."""
    recorder = api.recorder
    told: dict[str, Any] = {"requests": []}
    try:
        told["requests"] = await api.explainer.explain(
            api, holder, lambda: recorder.ring.numbered(map(recorder.number_of, request_ids), MOST))
    except ApiError as error:  # the response itself is complete
        told["error"] = error.content()
    return {"explain": told | {"step_time_model": told_of(api.step_times)}}


def told_of(times: StepTimeModel) -> dict[str, Any]:
    """How far predictions of the time a request would have taken alone can be trusted."""
    return {"median_error": round(times.error, 4), "steps": times.num_steps}

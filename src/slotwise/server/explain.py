"""`GET /explain/{request_id}` and the field `explain`: where a request's time went (see observe.explain)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from slotwise.observe.explain import explain
from slotwise.observe.facts import Facts, gather
from slotwise.observe.log import decode
from slotwise.observe.steptime import StepTimes
from slotwise.server.errors import ApiError
from slotwise.server.exchange import Exchange

if TYPE_CHECKING:
    from slotwise.server.generate import Api

MOST = 16  # requests explained at once: names for tracing may repeat, and a response may have many choices
MAX_WAITING = 64  # explanations that wait for the one being made


class Explainer:
    """Makes one explanation after the other, in a thread beside the streams."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    def check_room(self) -> None:
        """Raises ApiError when too many ask at once."""
        if self._waiting >= MAX_WAITING:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "too many explanations at once; try again later",
                           code="explainer_busy")

    async def explain(self, api: Api, which: Callable[[Facts], bool]) -> list[dict[str, Any]]:
        """The latest requests of `which` this is true, in order of arrival."""
        until_ns = time.monotonic_ns()
        self._waiting += 1
        try:
            async with self._turn:
                api.later.flush()
                lines = api.recorder.ring.lines()
                return await asyncio.to_thread(_explained, lines, api.step_times, which, until_ns)
        finally:
            self._waiting -= 1


def _explained(lines: Sequence[bytes], times: StepTimes, which: Callable[[Facts], bool],
               until_ns: int) -> list[dict[str, Any]]:
    entries = list(map(decode, lines))
    found = [facts for facts in gather(entries).values() if which(facts)]
    return [explain(facts, entries, times, until_ns).as_json() for facts in found[-MOST:]]


async def of_request(api: Api, exchange: Exchange) -> None:
    """Where the time of a request went, by its `X-Request-Id` or the `id` of its response."""
    api.explainer.check_room()
    name, tenant = exchange.scope["path_params"]["request_id"], api.keys.scope_of(exchange.tenant)
    told = await api.explainer.explain(api, lambda facts: facts.belongs_to(tenant) and facts.is_named(name))
    if not told:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is remembered whole", "request_id",
                       "request_not_found")
    await exchange.respond_json({"object": "explanation", "requests": told, "step_time_model": told_of(api.step_times)})


async def of_response(api: Api, request_ids: Sequence[str]) -> dict[str, Any]:
    """What stands in the response to a request that asked for it: everything up to now."""
    told = await api.explainer.explain(api, lambda facts: facts.request.id in request_ids)
    return {"explain": {"requests": told, "step_time_model": told_of(api.step_times)}}


def told_of(times: StepTimes) -> dict[str, Any]:
    """How far what a request would have taken alone can be trusted."""
    return {"median_error": round(times.error, 4), "steps": times.num_steps}

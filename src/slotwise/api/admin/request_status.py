"""Routes about requests in progress or remembered: where their time went, their queue position, and aborts.

A queue position comes from the engine, whose answer is exact: the requests that start before it by the policy in force,
at that moment.  `quotas.headers_of` has what the API process counts itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from slotwise.api.admin.cache_report import add_texts
from slotwise.api.generate.choice import Choice
from slotwise.api.generate.context import Api, RequestLimits, ServedEngine, ServerClients
from slotwise.api.http.api_errors import ApiError, from_queue_full, from_refusal
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.http.turns import QueueFull
from slotwise.api.limits.bodies import warn_of_unknown_fields
from slotwise.api.protocol.admin_protocol import AbortRequest
from slotwise.api.protocol.decoding import decode
from slotwise.engine.messages import RequestPosition
from slotwise.engine.refusals import Refused

MOST = 16  # choices in one response: tracing ids may repeat, and a response may have many choices
FINISHED = "finished"


@about(statuses=(HTTPStatus.TOO_MANY_REQUESTS,))
async def explain(api: Api, exchange: HttpExchange) -> None:
    """Where the time of a request went, by its `X-Request-Id` or the `id` of its response."""
    api.limits.quotas.count_request(api.limits.account(exchange))
    observers = api.observers
    observers.explainer.check_capacity(exchange.holder)
    name, scope = exchange.scope["path_params"]["request_id"], api.clients.keys.scope_of(exchange.tenant)
    explanations = await observers.explainer.named(exchange.holder, scope, name)
    if not explanations:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is remembered whole", "request_id",
                       "request_not_found")
    await add_texts(api, exchange.holder, explanations)
    await exchange.respond_json({
        "object": "explanation", "requests": explanations, "step_time_model": observers.explainer.trust})


async def status(clients: ServerClients, engine: ServedEngine, limits: RequestLimits,
                     exchange: HttpExchange) -> None:
    """The state and queue position of a request in progress, by its `X-Request-Id` or the `id` of its response."""
    name = exchange.scope["path_params"]["request_id"]
    requests = engine.active_requests.named(clients.keys.scope_of(exchange.tenant), name)
    found = [(choice, request.tier) for request in requests for choice in request.choices][-MOST:]
    if not found:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is under way", "request_id", "request_not_found")
    positions = await _positions(engine, limits, exchange.holder, [choice for choice, _ in found])
    statuses = [_status(limits, choice, tier, positions.get(choice.generation.request_id)) for choice, tier in found]
    await exchange.respond_json({"object": "request.status", "requests": statuses})


async def _positions(engine: ServedEngine, limits: RequestLimits, holder: str,
                     choices: Sequence[Choice]) -> dict[int, RequestPosition]:
    """Positions of the unfinished choices.  Clients take turns, for an answer may have to visit the whole queue."""
    unfinished = [choice.generation.request_id for choice in choices if not choice.generation.ended]
    if not unfinished:
        return {}
    try:
        async with limits.position_queries.turn(holder):
            return {position.request_id: position for position in await engine.client.queue_positions(unfinished)}
    except QueueFull as error:
        raise from_queue_full(error, "queries of queue positions", "queries_full") from error
    except Refused as refused:
        raise from_refusal(refused, limits.admission_control.retry_after) from refused


def _status(limits: RequestLimits, choice: Choice, tier: str, position: RequestPosition | None) -> dict[str, Any]:
    generation = choice.generation
    num_ahead = position.position if position is not None else None
    start = limits.admission_control.start_of(num_ahead) if num_ahead is not None else None
    return {
        "id": generation.name, "index": choice.index, "service_tier": tier or None,
        "state": position.state if position is not None else FINISHED,
        "since": round(time.time() - (time.monotonic_ns() - generation.moved_ns) * 1e-9, 3),
        "queue_position": num_ahead, "estimated_start_s": None if start is None else round(start, 3),
        "completion_tokens": position.num_output if position is not None else choice.num_tokens}


@about(body=AbortRequest)
async def abort_requests(clients: ServerClients, engine: ServedEngine, exchange: HttpExchange) -> None:
    """Abort requests in any state by their ids; each one in progress ends with finish_reason `abort`."""
    async with clients.bodies.reading(exchange) as body:
        names = decode(AbortRequest, body).names()
        warn_of_unknown_fields(exchange, AbortRequest, body)
    scope = clients.keys.scope_of(exchange.tenant)
    found = {name: engine.active_requests.abort(scope, name) for name in names}
    await exchange.respond_json({
        "aborted": [name for name, was_there in found.items() if was_there],
        "not_found": [name for name, was_there in found.items() if not was_there]})

"""`GET /explain/{request_id}`: where a request's time went (see `server.explainer`)."""

from __future__ import annotations

from http import HTTPStatus

from slotwise.server.context import Observers, RequestLimits, ServerClients
from slotwise.server.errors import ApiError
from slotwise.server.http_exchange import HttpExchange


async def of_request(clients: ServerClients, limits: RequestLimits, observers: Observers,
                     exchange: HttpExchange) -> None:
    """Where the time of a request went, by its `X-Request-Id` or the `id` of its response."""
    limits.quotas.count_request(limits.account(exchange))
    observers.explainer.check_capacity(exchange.holder)
    name, scope = exchange.scope["path_params"]["request_id"], clients.keys.scope_of(exchange.tenant)
    explanations = await observers.explainer.named(exchange.holder, scope, name)
    if not explanations:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is remembered whole", "request_id",
                       "request_not_found")
    await exchange.respond_json({
        "object": "explanation", "requests": explanations, "step_time_model": observers.explainer.trust})

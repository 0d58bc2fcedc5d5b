"""`GET /explain/{request_id}`: where a request's time went (see `server.explainer`)."""

from __future__ import annotations

from http import HTTPStatus

from slotwise.server.context import Api
from slotwise.server.errors import ApiError
from slotwise.server.http_exchange import HttpExchange


async def of_request(api: Api, exchange: HttpExchange) -> None:
    """Where the time of a request went, by its `X-Request-Id` or the `id` of its response."""
    api.quotas.count_request(api.account(exchange))
    api.explainer.check_capacity(exchange.holder)
    name, scope = exchange.scope["path_params"]["request_id"], api.keys.scope_of(exchange.tenant)
    explanations = await api.explainer.named(exchange.holder, scope, name)
    if not explanations:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is remembered whole", "request_id",
                       "request_not_found")
    await exchange.respond_json({
        "object": "explanation", "requests": explanations, "step_time_model": api.explainer.trust})

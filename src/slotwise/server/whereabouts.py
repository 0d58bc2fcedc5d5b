"""Where am I: `GET /requests/{request_id}`, and what responses and refusals say of the queue in their headers.

A header tells what the API process knows without asking: how many waited when a request came.  The route asks the
engine, whose answer is exact: how many are to start before it by the policy in force, at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from slotwise.engine.door import Outlook
from slotwise.engine.messages import Standing
from slotwise.engine.service import Refused
from slotwise.server.choice import Choice
from slotwise.server.errors import ApiError, from_refusal
from slotwise.server.exchange import Exchange

if TYPE_CHECKING:
    from slotwise.server.generate import Api

MOST = 16  # choices told of at once: names for tracing may repeat, and a response may have many
FINISHED = "finished"
POSITION, START = "X-Queue-Position", "X-Estimated-Start-Ms"


def headers_of(outlook: Outlook) -> tuple[tuple[bytes, bytes], ...]:
    """What was to be expected on arrival.  Without a measured pace there is no estimate."""
    position = (POSITION.lower().encode(), b"%d" % outlook.position)
    if outlook.start is None:
        return (position,)
    return position, (START.lower().encode(), b"%d" % round(outlook.start * 1000))


async def of_request(api: Api, exchange: Exchange) -> None:
    """Where a request under way stands, by its `X-Request-Id` or the `id` of its response."""
    name = exchange.scope["path_params"]["request_id"]
    lives = api.underway.named(api.keys.scope_of(exchange.tenant), name)
    found = [(choice, life.tier) for life in lives for choice in life.choices][-MOST:]
    if not found:
        raise ApiError(HTTPStatus.NOT_FOUND, "no request of that name is under way", "request_id", "request_not_found")
    standings = await _standings(api, [choice for choice, _ in found])
    told = [_told(api, choice, tier, standings.get(choice.generation.request_id)) for choice, tier in found]
    await exchange.respond_json({"object": "request.status", "requests": told})


async def _standings(api: Api, choices: Sequence[Choice]) -> dict[str, Standing]:
    """Of those who live."""
    living = [choice.generation.request_id for choice in choices if not choice.generation.ended]
    if not living:
        return {}
    try:
        return {standing.request_id: standing for standing in await api.service.locate(living)}
    except Refused as refused:
        raise from_refusal(refused, api.door.retry_after) from refused


def _told(api: Api, choice: Choice, tier: str, standing: Standing | None) -> dict[str, Any]:
    generation = choice.generation
    place = standing.place if standing is not None else None
    start = api.door.start_of(place) if place is not None else None
    return {
        "id": generation.request_id, "index": choice.index, "service_tier": tier or None,
        "state": standing.state if standing is not None else FINISHED,
        "since": round(time.time() - (time.monotonic_ns() - generation.moved_ns) * 1e-9, 3),
        "queue_position": place, "estimated_start_s": None if start is None else round(start, 3),
        "completion_tokens": standing.num_output if standing is not None else choice.num_tokens}

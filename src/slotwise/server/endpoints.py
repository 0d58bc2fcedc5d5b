"""What an endpoint says of itself, next to its code: `/openapi.json`, `/docs` and the reference are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

Json = dict[str, Any]
Endpoint = Callable[..., Awaitable[None]]
"""Receives the parts of the service that its parameters name, then the exchange: `metrics(observers, exchange)`."""

Decorated = TypeVar("Decorated", bound=Endpoint)


class About(NamedTuple):
    """What OpenAPI describes of an endpoint, beyond what all have."""

    body: type | None = None  # that its body is decoded into
    takes_body: bool = True  # if its method has one
    query: tuple[Json, ...] = ()  # parameters, each a name and a schema
    media_type: str = "application/json"  # of its response
    streams: bool = False  # server-sent events, if the request says so
    statuses: tuple[HTTPStatus, ...] = ()  # of errors


def about(**fields: Any) -> Callable[[Decorated], Decorated]:
    """Describes an endpoint.  Args: fields: those of `About`."""

    def described(endpoint: Decorated) -> Decorated:
        endpoint.about = About(**fields)  # type: ignore[attr-defined]
        return endpoint

    return described


def about_of(endpoint: Endpoint) -> About:
    """What an endpoint says of itself."""
    found: About = getattr(endpoint, "about", About())
    return found

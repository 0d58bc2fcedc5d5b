"""The ASGI application of a service: authentication, its routes, and a response to every error.

There is no middleware: one object stands before the routes, and streams write through it to the socket.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from slotwise.api.admin import lifecycle
from slotwise.api.anthropic import anthropic_messages
from slotwise.api.generate.context import Clients
from slotwise.api.generate.request_log import RequestLog
from slotwise.api.http.api_errors import (
    CONTEXT_EXCEEDED,
    OPENAI,
    ApiError,
    ClientGone,
    ErrorFormat,
    from_refusal,
)
from slotwise.api.http.http_exchange import Endpoint, HttpExchange, checked_request_id
from slotwise.api.http.listener import ALWAYS
from slotwise.api.limits.browsers import WITH_A_BODY, check_json, check_one_host, is_local, is_preflight
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.api.openai.responses import ERRORS, RESPONSES
from slotwise.api.protocol.unsupported import meant, why_not_served
from slotwise.engine.refusals import Refused

OPEN_TO_ALL = ("/", "/docs", "/health", "/links", "/ping", "/timeline")  # the pages hold no data
# By the beginnings of paths.
ERROR_FORMATS = {anthropic_messages.MESSAGES: anthropic_messages.ERRORS, RESPONSES: ERRORS}
ADMIN = (  # beginnings of the operator's routes
    "/admin/", "/what_if", lifecycle.SLEEP, lifecycle.WAKE_UP, lifecycle.LOAD_MODEL, lifecycle.LOAD, lifecycle.UNLOAD)
MAX_ROUTES = 2000  # characters of the routes that an error lists
REJECTIONS = (CONTEXT_EXCEEDED, "tokenizer_busy")  # codes of errors that count as refused admissions

logger = logging.getLogger(__name__)

WHOLE = ("api", "door")  # names of a parameter that receives the service itself


class Service(Protocol):
    """What stands behind the routes: a server's `Api`, or a front door."""

    settings: ServerSettings
    request_log: RequestLog
    num_exchanges: int  # in progress, of any kind

    @property
    def clients(self) -> Clients: ...

    @property
    def hopeless(self) -> asyncio.Event:
        """Set when the service cannot go on."""
        ...

    def refused(self, kind: str) -> None:
        """Count a request that was refused before it was sent on."""
        ...

    async def drain(self) -> None:
        """Refuse new requests, and wait for the unfinished ones for as long as the settings allow."""
        ...


Served = TypeVar("Served", bound=Service)


class App(Generic[Served]):
    """An ASGI application; `api` may be exchanged for that of another model.

    Args:
        routes: each a method, a path and an endpoint.
    """

    def __init__(self, api: Served, routes: Sequence[tuple[str, str, Endpoint]]) -> None:
        self.api = api
        self._routes = routes
        # The most frequent routes need no search, which is a sixth of the cost of refusing a request.
        self._known = {(method, path): _bound(endpoint) for method, path, endpoint in routes if "{" not in path}
        self.router = Router(
            [Route(path, _Endpoint(self, endpoint), methods=[method]) for method, path, endpoint in routes],
            redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"this application does not speak {scope['type']}")
        scope["path"] = below(self.api.settings.root_path, scope["path"])
        headers = dict(scope["headers"])
        exchange = HttpExchange(scope, receive, send, secrets.token_hex(16))
        exchange.error_format = error_format(scope["path"])
        scope["exchange"] = exchange
        scope["app"] = self  # so that the router raises what it cannot answer
        api = self.api
        api.num_exchanges += 1
        try:
            if given := headers.get(b"x-request-id"):
                exchange.request_id = checked_request_id(given.decode("latin-1"), "X-Request-Id")
            check_one_host(scope["headers"])
            exchange.more += self.api.clients.browsers.check(scope["method"], headers)
            if "reserved" in scope and scope["path"] not in ALWAYS:
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open; try again later",
                               code="too_many_connections")
            if is_preflight(scope["method"], headers):
                await exchange.respond(b"", headers=self.api.clients.browsers.preflight(headers))
                return
            if scope["path"] not in OPEN_TO_ALL:
                exchange.tenant = self._tenant(scope, headers)
            if endpoint := self._known.get((scope["method"], scope["path"])):
                if scope["method"] in WITH_A_BODY:
                    check_json(headers)
                await endpoint(self.api, exchange)
            else:
                await self.router(scope, receive, send)
        except ClientGone:
            return
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the tokenizer is not written in Python: its panics do not subclass Exception
            answer = self._methods_of(scope) if _is_wrong_method(error) else self._as_api_error(
                error, scope["path"])
            if answer.code in REJECTIONS:
                self.api.refused(answer.code)
            await exchange.respond_error(answer)
        finally:
            api.num_exchanges -= 1
            api.request_log.ended(exchange)
            del scope["exchange"]  # else they refer to each other, and the collector that frees them runs rarely

    def _methods_of(self, scope: Scope) -> ApiError:
        """The error of a method that a route does not have; its header `Allow` lists those that it has."""
        found = {name for route in self.router.routes if isinstance(route, Route)
                 if route.matches(scope)[0] is not Match.NONE for name in route.methods or ()}
        listed = ", ".join(sorted(found))
        return ApiError(HTTPStatus.METHOD_NOT_ALLOWED, f"this route has the methods {listed}, not {scope['method']}",
                        code="method_not_allowed", more=((b"allow", listed.encode()),))

    def _as_api_error(self, error: BaseException, path: str) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, Refused):
            return from_refusal(error)
        if isinstance(error, HTTPException):
            if error.status_code == HTTPStatus.NOT_FOUND:
                if why := why_not_served(path):
                    return ApiError(HTTPStatus.NOT_FOUND, why, code="not_supported")
                near = meant(path, [route for _, route, _ in self._routes])
                others = f"did you mean {near}?" if near else f"there are {self._known_routes()}"
                return ApiError(HTTPStatus.NOT_FOUND, f"there is no such route; {others}", code="not_found")
            return ApiError(error.status_code, str(error.detail))
        logger.error("a request failed", exc_info=error)
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log says more")

    def _known_routes(self) -> str:
        listed = [f"{method} {path.replace(':path}', '}')}" for method, path, _ in self._routes]
        return ", ".join(listed)[:MAX_ROUTES]

    def _tenant(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """The tenant of a request's key.  Raises ApiError: the key does not open this path."""
        keys, authorization = self.api.clients.keys, headers.get(b"authorization", b"")
        if not authorization and (key := headers.get(b"x-api-key")):  # Anthropic's header
            authorization = b"Bearer " + key
        if keys.needed if scope["path"] == lifecycle.RESET else not scope["path"].startswith(ADMIN):
            return keys.tenant(authorization)
        client = scope.get("client") or ("",)
        return keys.admin(authorization, is_local=is_local(client[0], headers))


def _bound(endpoint: Endpoint) -> Callable[[Any, HttpExchange], Awaitable[None]]:
    """An endpoint that receives the whole service, and passes on the parts that its parameters name."""
    *names, _ = inspect.signature(endpoint).parameters
    if names in ([name] for name in WHOLE):
        return endpoint
    parts = [_itself if name in WHOLE else attrgetter(name) for name in names]
    return lambda service, exchange: endpoint(*[part(service) for part in parts], exchange)


def _itself(service: Any) -> Any:
    return service


def below(root_path: str, path: str) -> str:
    """A path as the routes have it: a reverse proxy may pass its prefix on, or have taken it off."""
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        return path[len(root_path):] or "/"
    return path


def error_format(path: str) -> ErrorFormat:
    return next((form for beginning, form in ERROR_FORMATS.items() if path.startswith(beginning)), OPENAI)


class _Endpoint:
    """A class instance, because Starlette wraps functions in its own request and response."""

    def __init__(self, app: App[Any], endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = _bound(endpoint)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(self._app.api, scope["exchange"])


def _is_wrong_method(error: BaseException) -> bool:
    return isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED

"""The ASGI application: routes, authentication, and a response to every error.

There is no middleware: one object stands before the routes, and streams write through it to the socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from slotwise.engine.client import EngineClient
from slotwise.engine.sleep import Sleep
from slotwise.observe.step_time import StepTimeModel
from slotwise.server import admin, explain, lifecycle, messages_output, pages, queue_position
from slotwise.server.browsers import WITH_A_BODY, check_json, check_one_host, is_local, is_preflight
from slotwise.server.completions import chat_completions, completions
from slotwise.server.connections import ALWAYS
from slotwise.server.context import Api
from slotwise.server.embeddings import embeddings
from slotwise.server.errors import OPENAI, ApiError, ClientGone, ErrorFormat
from slotwise.server.events import events
from slotwise.server.http_exchange import HttpExchange, checked_request_id
from slotwise.server.messages import count_tokens, messages
from slotwise.server.openapi import document
from slotwise.server.parsers.registry import UNPARSED, OutputFormat
from slotwise.server.prompts import Prompts
from slotwise.server.responses import ERRORS, RESPONSES, delete_response, responses, stored_response
from slotwise.server.settings import ServerSettings
from slotwise.server.templates import Template
from slotwise.server.timeline import timeline
from slotwise.server.unsupported import why_not_served
from slotwise.text.tokenizer import Tokenizer

Endpoint = Callable[[Api, HttpExchange], Awaitable[None]]


async def openapi(api: Api, exchange: HttpExchange) -> None:
    """The OpenAPI document of this service."""
    await exchange.respond(_document(api.settings.root_path))


async def docs(api: Api, exchange: HttpExchange) -> None:
    """The routes and their bodies, from the OpenAPI document, as an HTML page."""
    await pages.respond(exchange, _reference(api.settings.root_path))


@cache
def _document(root_path: str) -> bytes:
    return document(ROUTES, OPEN_TO_ALL, root_path)


@cache
def _reference(root_path: str) -> bytes:
    return pages.reference(document(ROUTES, OPEN_TO_ALL), root_path)


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", RESPONSES, responses),
    ("GET", RESPONSES + "/{response_id:path}", stored_response),
    ("DELETE", RESPONSES + "/{response_id:path}", delete_response),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings),
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{model:path}", admin.model),
    ("POST", "/tokenize", admin.tokenize),
    ("POST", "/detokenize", admin.detokenize),
    ("POST", "/abort_requests", admin.abort_requests),
    ("GET", "/health", admin.health),
    ("GET", "/ping", admin.health),
    ("POST", "/ping", admin.health),
    ("GET", "/version", admin.version),
    ("GET", "/", pages.index),
    ("GET", "/docs", docs),
    ("GET", "/openapi.json", openapi),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/load", admin.load),
    ("GET", "/experts", admin.experts),
    ("GET", "/admin/scheduling", admin.scheduling),
    ("PUT", "/admin/scheduling", admin.reschedule),
    ("POST", "/what_if", admin.what_if),
    ("POST", lifecycle.SLEEP, lifecycle.sleep),
    ("POST", lifecycle.WAKE_UP, lifecycle.wake_up),
    ("GET", "/is_sleeping", lifecycle.is_sleeping),
    ("POST", lifecycle.LOAD_MODEL, lifecycle.load_model),
    ("GET", "/timeline", timeline),
    ("GET", "/events", events),
    ("GET", "/explain/{request_id:path}", explain.of_request),
    ("GET", "/requests/{request_id:path}", queue_position.of_request),
)
OPEN_TO_ALL = ("/", "/docs", "/health", "/ping", "/timeline")  # the pages hold no data; the last prompts for a key
ERROR_FORMATS = {messages_output.MESSAGES: messages_output.ERRORS, RESPONSES: ERRORS}  # by the beginnings of paths
ADMIN = ("/admin/", "/what_if", lifecycle.SLEEP, lifecycle.WAKE_UP, lifecycle.LOAD_MODEL)  # the operator's
MAX_ROUTES = 2000  # characters of the routes that an error lists
REJECTIONS = ("context_length_exceeded", "tokenizer_busy")  # codes of errors that count as refused admissions

logger = logging.getLogger(__name__)


def build_api(engine_client: EngineClient, tokenizer: Tokenizer, chat_template: Template | None,
              settings: ServerSettings, step_times: StepTimeModel | None = None,
              output_format: OutputFormat = UNPARSED, sleep: Sleep | None = None, before: Api | None = None) -> Api:
    """What answers requests over an engine that is ready.

    Args:
        step_times: a model fitted earlier; None: an empty one.
        output_format: how the model's outputs are parsed.
        sleep: of the engine; None: it cannot sleep here.
        before: of the model that was served until now, whose clients go on.
    """
    prompts = Prompts(tokenizer, chat_template, lambda: engine_client.info)
    clients = None if before is None else before.clients
    return Api(engine_client, prompts, settings, step_times or StepTimeModel(), output_format, sleep, clients)


class App:
    """An ASGI application; `api` may be exchanged for that of another model."""

    def __init__(self, api: Api) -> None:
        self.api = api
        # The most frequent routes need no search, which is a sixth of the cost of refusing a request.
        self._known = {(method, path): endpoint for method, path, endpoint in ROUTES if "{" not in path}
        self.router = Router(
            [Route(path, _Endpoint(self, endpoint), methods=[method]) for method, path, endpoint in ROUTES],
            redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(f"this application does not speak {scope['type']}")
        scope["path"] = below(self.api.settings.root_path, scope["path"])
        headers = dict(scope["headers"])
        exchange = HttpExchange(scope, receive, send, secrets.token_hex(16))
        exchange.error_format = _error_format(scope["path"])
        scope["exchange"] = exchange
        scope["app"] = self  # so that the router raises what it cannot answer
        api = self.api
        api.num_exchanges += 1
        try:
            if given := headers.get(b"x-request-id"):
                exchange.request_id = checked_request_id(given.decode("latin-1"), "X-Request-Id")
            check_one_host(scope["headers"])
            exchange.more += self.api.browsers.check(scope["method"], headers)
            if "reserved" in scope and scope["path"] not in ALWAYS:
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open; try again later",
                               code="too_many_connections")
            if is_preflight(scope["method"], headers):
                await exchange.respond(b"", headers=self.api.browsers.preflight(headers))
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
        except BaseException as error:  # the tokenizer is not written in Python: its panics are no Exceptions
            answer = self._methods_of(scope) if _is_wrong_method(error) else _as_api_error(error, scope["path"])
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

    def _tenant(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """The tenant of a request's key.  Raises ApiError: the key does not open this path."""
        keys, authorization = self.api.keys, headers.get(b"authorization", b"")
        if not authorization and (key := headers.get(b"x-api-key")):  # Anthropic's header
            authorization = b"Bearer " + key
        if not scope["path"].startswith(ADMIN):
            return keys.tenant(authorization)
        client = scope.get("client") or ("",)
        return keys.admin(authorization, is_local=is_local(client[0], headers))


def below(root_path: str, path: str) -> str:
    """A path as the routes have it: a reverse proxy may pass its prefix on, or have taken it off."""
    if root_path and (path == root_path or path.startswith(root_path + "/")):
        return path[len(root_path):] or "/"
    return path


def _error_format(path: str) -> ErrorFormat:
    return next((form for beginning, form in ERROR_FORMATS.items() if path.startswith(beginning)), OPENAI)


class _Endpoint:
    """A class instance, because Starlette wraps functions in its own request and response."""

    def __init__(self, app: App, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(self._app.api, scope["exchange"])


def _as_api_error(error: BaseException, path: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        if error.status_code == HTTPStatus.NOT_FOUND:
            if why := why_not_served(path):
                return ApiError(HTTPStatus.NOT_FOUND, why, code="not_supported")
            return ApiError(HTTPStatus.NOT_FOUND, f"there is no such route; there are {_known_routes()}",
                            code="not_found")
        return ApiError(error.status_code, str(error.detail))
    logger.error("a request failed", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log says more")


def _is_wrong_method(error: BaseException) -> bool:
    return isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED


def _known_routes() -> str:
    return ", ".join([f"{method} {path.replace(':path}', '}')}" for method, path, _ in ROUTES])[:MAX_ROUTES]

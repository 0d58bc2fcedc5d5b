"""One HTTP exchange over raw ASGI: the body in, JSON or server-sent events out, and whether the client is connected.

Streams write straight to `send`: a layer between would cost as much as everything else done for a token.

An endpoint answers an exchange.  What `/openapi.json`, `/docs` and the reference say of it stands above it, in `about`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from slotwise.api.http.api_errors import OPENAI, ApiError, ClientGone, bad_request
from slotwise.api.http.listener import client_of

Headers = list[tuple[bytes, bytes]]
STEP = 256 << 10  # bytes that one read returns, claimed ahead of a body without an announced length; or sent at once
NO_SNIFFING = (b"x-content-type-options", b"nosniff")  # browsers then run no response as a script
DONE = b"data: [DONE]\n\n"
MAX_QUERY = 2048  # characters
LOOK = 1.0  # seconds between two looks whether a silent stream may begin
Json = dict[str, Any]
Endpoint = Callable[..., Awaitable[None]]
"""Receives the parts of the service that its parameters name, then the exchange: `metrics(observers, exchange)`."""

Decorated = TypeVar("Decorated", bound=Endpoint)


# -- exchanges ---------------------------------------------------------------------------------------------------------


class HttpExchange:
    """A request and its response.

    Args:
        scope, receive, send: ASGI's.
        request_id: the client's or a generated one; sent in every response.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send,
                 request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.error_format = OPENAI
        self.tenant = ""  # of the request's key
        self.traceparent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        self.received_ns = time.monotonic_ns()
        self.read_ns = 0  # the body was read whole
        self.status = 0  # of the response; 0: none has begun
        self.about_generation: Callable[[HttpExchange], dict[str, Any]] = lambda exchange: {}  # for its log line
        self.more: Headers = [NO_SNIFFING]  # headers of every response
        self.late_headers: Callable[[], Headers] = list  # further headers, evaluated when the response begins
        self._sent_ns = self.received_ns  # the last event was sent
        self._is_closed = False  # so was the last of a stream
        self._receive = receive
        self._send = send

    @property
    def is_head(self) -> bool:
        """Whether the method is HEAD: the response has no body."""
        return bool(self.scope["method"] == "HEAD")

    def query(self) -> list[tuple[str, str]]:
        """The parameters of the query, in order.  Raises ApiError: it is longer than MAX_QUERY."""
        text = self.scope["query_string"].decode("latin-1")
        if len(text) > MAX_QUERY:
            raise bad_request(f"the query has more than {MAX_QUERY} characters")
        return parse_qsl(text, keep_blank_values=True)

    @property
    def holder(self) -> str:
        """The key of per-client bounds: the tenant, else what counts as one client of the address."""
        client = self.scope.get("client")
        return self.tenant or (client_of(client[0]) if client else "")

    # -- request -------------------------------------------------------------------------------------------------

    async def body(self, max_bytes: int, timeout: float, claim: Callable[[int], None] = lambda size: None) -> bytes:
        """The whole body; `claim` receives a lower bound of its bytes before they arrive, and may refuse by raising.

        Raises:
            ApiError: it is too large or too slow.
            ClientGone: the client disconnected before its end.
        """
        announced = int(dict(self.scope["headers"]).get(b"content-length", b"0"))
        if announced > max_bytes:
            raise too_large(max_bytes)
        claim(announced)
        try:
            async with asyncio.timeout(timeout):
                return await self._body(max_bytes, lambda size: claim(max(announced, size + STEP)))
        except TimeoutError as error:
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {timeout:g} seconds") from error

    async def _body(self, max_bytes: int, claim: Callable[[int], None]) -> bytes:
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                self.read_ns = time.monotonic_ns()
                return b"".join(parts)
            claim(size)

    @asynccontextmanager
    async def watched(self, on_gone: Callable[[], None]) -> AsyncIterator[None]:
        """Call `on_gone` when the client disconnects meanwhile.  For use once the body is read."""
        watcher = asyncio.create_task(self._watch(on_gone))
        try:
            yield
        finally:
            watcher.cancel()

    async def _watch(self, on_gone: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone()

    @asynccontextmanager
    async def kept_alive(self, sign: bytes, seconds: float, may_begin: Callable[[], bool]) -> AsyncIterator[None]:
        """Send `sign`, a whole event that clients pass over, whenever a stream has been silent for `seconds`.

        Args:
            may_begin: whether it may begin the response, so that an error from then on is an event and has no status.
        """
        task = asyncio.create_task(self._keep_alive(sign, seconds, may_begin))
        try:
            yield
        finally:
            task.cancel()

    async def _keep_alive(self, sign: bytes, seconds: float, may_begin: Callable[[], bool]) -> None:
        while not self._is_closed:
            silent = (time.monotonic_ns() - self._sent_ns) * 1e-9
            if silent < seconds:
                await asyncio.sleep(seconds - silent)
            elif self.status or may_begin():
                await self.event(sign)
            else:
                await asyncio.sleep(min(seconds, LOOK))

    # -- response ------------------------------------------------------------------------------------------------

    async def respond(self, body: bytes, status: int = HTTPStatus.OK, content_type: bytes = b"application/json",
                      headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", content_type), length, *(headers or [])])
        await self._send({"type": "http.response.body", "body": body})

    async def respond_in_parts(self, parts: list[bytes]) -> None:
        """Send a JSON body of any length: a bounded number of bytes in one pass of the event loop."""
        length = sum(map(len, parts))
        if length <= STEP:
            await self.respond(b"".join(parts))
            return
        await self._start(HTTPStatus.OK, [(b"content-type", b"application/json"),
                                          (b"content-length", str(length).encode())])
        parts.reverse()  # each is freed once it is sent
        while parts:
            group, size = [], 0
            while parts and size < STEP:
                group.append(parts.pop())
                size += len(group[-1])
            await self._send({"type": "http.response.body", "body": b"".join(group), "more_body": bool(parts)})
            await asyncio.sleep(0)

    async def respond_json(self, value: object) -> None:
        await self.respond(msgspec.json.encode(value))

    async def respond_error(self, error: ApiError) -> None:
        """Send an error: as the response, or as the last event of a stream in progress."""
        if self.status:
            await self.close(self.error_format.last(error, self.request_id))
        else:
            body = self.error_format.body(error, self.request_id)
            await self.respond(body, error.status, headers=error.headers())

    async def event(self, data: bytes, content_type: bytes = b"text/event-stream; charset=utf-8") -> None:
        """Send whole events of a stream.  The first starts the response, so that errors before it have a status.

        Raises:
            ApiError: the client speaks HTTP/1.0, which knows no response of unknown length on an open connection.
        """
        if not self.status:
            if self.scope["http_version"] == "1.0":
                raise bad_request("stream: a stream needs HTTP/1.1", "stream")
            await self._start(HTTPStatus.OK, [(b"content-type", content_type), (b"cache-control", b"no-cache")])
        self._sent_ns = time.monotonic_ns()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Send the last events of a stream of OpenAI's kind."""
        await self.close(events + DONE)

    async def close(self, rest: bytes = b"") -> None:
        """Send the rest of a stream."""
        self._is_closed = True
        await self._send({"type": "http.response.body", "body": rest})

    def abort(self) -> None:
        """Close the connection at once; written but unsent bytes are dropped."""
        self.scope["transport"].abort()

    def end_at_eof(self) -> None:
        """A client that ends its sending side counts as gone: a stream that may write nothing for long cannot tell."""
        self.scope["ends_at_eof"] = True

    def limit_unsent(self, num_bytes: int) -> None:
        """Bound what the kernel keeps for a client that does not read; Linux allows twice as much."""
        sock = self.scope["transport"].get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = int(status)
        headers += self.more
        headers += self.late_headers()
        headers.append((b"x-request-id", self.request_id.encode("ascii")))
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})


def too_large(max_bytes: int) -> ApiError:
    """The error of a body that has more bytes."""
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {max_bytes} bytes",
                    code="body_too_large")


def checked_request_id(request_id: str, param: str) -> str:
    """Raises ApiError for an id that cannot stand in a header or a log."""
    if not (0 < len(request_id) <= 128 and request_id.isascii() and request_id.isprintable()):
        raise bad_request("a request id has 1 to 128 printable ASCII characters", param)
    return request_id


# -- endpoints ---------------------------------------------------------------------------------------------------------


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

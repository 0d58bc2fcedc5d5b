"""The path of one request through the front door: to a replica, and its response back to the client.

    route ─► send ─► head ─► first output to the client ─► ... ─► end
      ▲        │ failed       │                              │ failed
      └────────┴──────────────┘ once                         └─► an error ends the stream

A request whose replica fails before the client has received any output goes to another replica, once.  Behind that an
error ends a stream, in the form of its route, and cuts a whole response short.  A stream is passed on in whole events.
Signs of life are passed on, too, and are no output: the stream that they begin may still come from another replica, and
an answer with an error becomes an event.  A client that leaves closes the connection to the replica, which then aborts
the generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

from slotwise.routing.fleet import Shed
from slotwise.scale.prefill import Prefill
from slotwise.scale.routed import Prompt
from slotwise.scale.upstream import ReplicaLost, Upstream, end
from slotwise.server.api_errors import ApiError, ClientGone
from slotwise.server.http_exchange import Headers, HttpExchange
from slotwise.server.prompt_transfer import HEADER
from slotwise.server.shapes import CHAT, MESSAGE

if TYPE_CHECKING:
    from slotwise.scale.door import Door

ATTEMPTS = 2
WHOLE = 1 << 20  # bytes of a response that is sent only once it is whole
MAX_EVENT = 16 << 20  # bytes; a longer event is passed on in parts
EVENT_STREAM = "text/event-stream"
SIGNS = (CHAT.waiting, MESSAGE.waiting)
ELSEWHERE = ("draining", "engine_dead", "queue_full", "engine_error", "too_many_connections", "bodies_full",
             "adapter_loading")
"""Codes of errors with which another replica may serve the request."""

NOT_FORWARDED = frozenset((  # of one connection (RFC 9110, 7.6.1), or made anew, or checked by the door
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect",
    b"origin", b"cookie", b"x-request-id", b"x-slotwise-prefix", HEADER.lower().encode()))
NOT_RETURNED = NOT_FORWARDED | {b"date", b"server", b"content-type", b"x-content-type-options", b"cache-control"}


class _Content(msgspec.Struct):
    code: str | None = None


class _Error(msgspec.Struct):
    """What errors of all routes' forms have."""

    error: _Content


class Answer(NamedTuple):
    """A response that was read whole."""

    status: int
    headers: Headers
    content_type: bytes
    body: bytes

    @property
    def code(self) -> str:
        """The code of an error; "" for anything else."""
        return _code_in(self.body)


class Opening:
    """What another replica may still replace of a response in whole events: nothing, or signs of life."""

    def __init__(self) -> None:
        self.is_over = False  # the client has received some output

    def read(self, events: bytes) -> bool:
        """Whether the next events are an error with which another replica may serve the request."""
        output = events
        while sign := next((sign for sign in SIGNS if output.startswith(sign)), b""):
            output = output[len(sign) :]
        if self.is_over or not output:
            return False
        if output.startswith((b'data: {"error":', b"event: error\n")):
            _, _, data = output.partition(b"data: ")
            if _code_in(data.partition(b"\n")[0]) in ELSEWHERE:
                return True
        self.is_over = True
        return False


def _code_in(body: bytes) -> str:
    """The code of an error; "" for anything else."""
    try:
        return msgspec.json.decode(body, type=_Error).error.code or ""
    except msgspec.DecodeError:
        return ""


class TurnedAway(Exception):
    """The replica has answered with an error that another one need not give."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def target_of(exchange: HttpExchange) -> str:
    """The path and query of a request, as they were sent."""
    query = exchange.scope["query_string"].decode("latin-1")
    path: bytes = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
    return path.decode("latin-1") + (f"?{query}" if query else "")


def headers_of(exchange: HttpExchange, prompt: Prompt | None = None) -> dict[str, str]:
    """The headers with which a request is sent on."""
    kept = {name.decode("latin-1"): _text(value) for name, value in exchange.scope["headers"]
            if name not in NOT_FORWARDED and not name.startswith(b"sec-fetch-")}
    prefix = {"x-slotwise-prefix": prompt.header} if prompt is not None and prompt.pieces else {}
    return kept | prefix | {"x-request-id": exchange.request_id}


def _text(value: bytes) -> str:
    """The value of a header; it is sent on in UTF-8, so what is UTF-8 stays as it is."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class Forwarding:
    """One request, which is sent to a replica, and perhaps to a second one.

    Args:
        without: replicas that are not to be chosen.
    """

    def __init__(self, door: Door, exchange: HttpExchange, body: bytes, prompt: Prompt,
                 without: frozenset[str] = frozenset()) -> None:
        self._door, self._exchange, self._body, self._prompt = door, exchange, body, prompt
        self._failed = set(without)
        self._id = door.next_id()
        self._gone = False
        self._opening = Opening()
        self._scope: asyncio.Timeout | None = None  # of the attempt in progress

    async def run(self) -> None:
        """Raises ApiError: no replica may serve it, or the last one failed; ClientGone: the client has left."""
        turned_away: Answer | None = None
        async with self._exchange.watched(self._leave):
            for attempt in range(ATTEMPTS):
                upstream = self._route(is_first=attempt == 0)
                if upstream is None:
                    break
                try:
                    await self._attempt(upstream)
                    return
                except TurnedAway as error:
                    turned_away = error.answer
                except ReplicaLost as error:
                    self._check_retry(error)
                finally:
                    self._door.fleet.finished(self._id)
                self._failed.add(upstream.name)
                self._door.metrics.rerouted += attempt == 0
            if turned_away is not None:
                await send(self._exchange, turned_away)
                return
        raise replica_lost()

    def _leave(self) -> None:
        self._gone = True
        if self._scope is not None:
            end(self._scope)

    def _route(self, *, is_first: bool) -> Upstream | None:
        """The replica to send it to; None: there is no second one."""
        door, now = self._door, asyncio.get_running_loop().time()
        request = door.request_of(self._prompt, self._id)
        found = door.fleet.route(request, now, self._failed)
        if not isinstance(found, Shed):
            door.metrics.routed[found.name] += 1
            return door.replicas.upstream(found.name)
        if is_first:
            raise door.shed(found, request.adapter)
        return None

    def _check_retry(self, error: ReplicaLost) -> None:
        """Raises unless the request may go elsewhere."""
        if self._gone:
            raise ClientGone from error
        if self._opening.is_over:
            raise replica_lost() from error

    async def _attempt(self, upstream: Upstream) -> None:
        exchange = self._exchange
        if self._gone:
            raise ClientGone
        sent = headers_of(exchange, self._prompt)
        prefill = Prefill(self._door, exchange.scope["path"], sent, self._body, self._prompt)
        try:
            async with upstream.until_lost() as self._scope:
                body, headers = await prefill.begin(upstream.name, self._id, self._failed)
                async with upstream.sending(exchange.scope["method"], target_of(exchange), headers, body) as response:
                    if response.content_type == EVENT_STREAM:
                        await self._pass_stream(response)
                    else:
                        await self._pass_whole(response)
        finally:
            self._scope = None
            prefill.end()

    async def _pass_stream(self, response: aiohttp.ClientResponse) -> None:
        exchange = self._exchange
        async for events in whole_events(response.content):
            if self._opening.read(events):
                raise TurnedAway(answer_of(response, events))
            if not exchange.status:
                exchange.more += returned(response.headers)
            if self._opening.is_over:
                self._output()
            await exchange.event(events)
        await exchange.close()

    async def _pass_whole(self, response: aiohttp.ClientResponse) -> None:
        """Sends a response once it is whole; a very long one in parts, and it is cut short if the replica fails."""
        exchange, parts, size = self._exchange, list[bytes](), 0
        async for part in response.content.iter_any():
            self._output()
            parts.append(part)
            size += len(part)
            if size > WHOLE:
                await self._pass_long(response, b"".join(parts))
                return
        answer = answer_of(response, b"".join(parts))
        if answer.code in ELSEWHERE:
            raise TurnedAway(answer)
        await send(exchange, answer)

    async def _pass_long(self, response: aiohttp.ClientResponse, begun: bytes) -> None:
        exchange, self._opening.is_over = self._exchange, True
        exchange.more += returned(response.headers)
        try:
            await exchange.event(begun, response.headers.get("content-type", "application/json").encode("latin-1"))
            async for part in response.content.iter_any():
                await exchange.event(part)
        except BaseException:
            exchange.abort()
            raise
        await exchange.close()

    def _output(self) -> None:
        self._door.fleet.first_output(self._id, asyncio.get_running_loop().time())


async def whole_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields a stream in whole events, so that an error may follow each of them; at the end whatever is left."""
    pending = b""
    async for part in content.iter_any():
        pending += part
        length = pending.rfind(b"\n\n") + 2 if len(pending) < MAX_EVENT else len(pending)
        if length > 1:
            yield pending[:length]
            pending = pending[length:]
    if pending:
        yield pending


def no_replica() -> ApiError:
    """The error of a request while no replica answers."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "no replica is ready; try again later", code="no_replica")


def replica_lost() -> ApiError:
    """The error of a request whose replica failed, and that no other one may serve."""
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the replica that served this request was lost",
                    code="replica_lost")


def answer_of(response: aiohttp.ClientResponse, body: bytes) -> Answer:
    """A response with the body that was read."""
    content_type = response.headers.get("content-type", "application/json").encode("latin-1")
    return Answer(response.status, returned(response.headers), content_type, body)


def returned(headers: Mapping[str, str]) -> Headers:
    """The headers of a response that are passed on."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
            if name.lower().encode("latin-1") not in NOT_RETURNED]


async def ask(upstream: Upstream, exchange: HttpExchange, method: str, target: str, body: bytes = b"") -> Answer:
    """Sends a request to one replica, with the headers of an exchange, and reads its whole answer.

    Raises:
        ReplicaLost: the replica failed.
    """
    async with upstream.until_lost(), upstream.sending(method, target, headers_of(exchange), body) as response:
        return answer_of(response, await response.read())


async def ask_all(upstreams: Sequence[Upstream], exchange: HttpExchange, method: str, target: str, body: bytes = b"",
                  ) -> list[tuple[Upstream, Answer]]:
    """Asks every replica, as `ask` does; those that fail are left out."""

    async def of_one(upstream: Upstream) -> list[tuple[Upstream, Answer]]:
        try:
            return [(upstream, await ask(upstream, exchange, method, target, body))]
        except ReplicaLost:
            return []

    found = await asyncio.gather(*map(of_one, upstreams))
    return [one for some in found for one in some]


async def send(exchange: HttpExchange, answer: Answer) -> None:
    """Sends a replica's answer to the client: as the last events of a stream that signs of life have begun."""
    if exchange.status:
        is_stream = answer.content_type.startswith(EVENT_STREAM.encode())
        await exchange.close(answer.body if is_stream else exchange.error_format.events % answer.body)
        return
    await exchange.respond(answer.body, answer.status, answer.content_type, answer.headers)

"""A replica as the front door reaches it: its address, what is open to it, and when it was last heard.

Whatever waits for a replica does so within `until_lost`, which raises ReplicaLost the moment the replica is given up:
nothing waits for one that has died or shows no sign of life.

A request is sent on with most of its headers, and with what a router knows of its prompt; an answer is read whole, or
passed on in whole events, so that an error may follow each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import msgspec
from yarl import URL

from slotwise.api.admin.replica_state import AdapterState, ReplicaState
from slotwise.api.generate.prompt_transfer import HEADER
from slotwise.api.generate.shapes import CHAT, MESSAGE
from slotwise.api.http.api_errors import ApiError
from slotwise.api.http.http_exchange import Headers, HttpExchange
from slotwise.core.routing.prompt import PIECE, RoutedRequest, digests, written

POLL_TIMEOUT = 5.0  # seconds for an answer of GET /replica
PROMPT_FIELDS = (  # in the order of a prompt
    "tools", "system", "instructions", "messages", "input", "prompt", "state", "query")
SALTS = ("model", "cache_salt")  # fields whose values prompts have to share before they share cached blocks
SESSIONS = ("session_id", "prompt_cache_key")  # hints of a body; the first one given names its session
SESSION_HEADER = b"x-session-id"
BYTES_PER_TOKEN = 4.0  # until a replica has reported
ELEMENT = b"\x00"  # between two fields: it stands in no JSON text

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
ATTEMPTS = 2
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


# -- the replica -------------------------------------------------------------------------------------------------------


class ReplicaLost(Exception):
    """The replica was given up, or the connection to it broke."""


class Upstream:
    """Args: headers: of the door's own requests."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.name, self.url = name, url
        self.heard = asyncio.get_running_loop().time()  # when it last answered, in seconds of the loop
        self.adapters: dict[str, AdapterState] = {}  # by name, as last reported
        self.is_lost = False
        self._session = session
        self._headers = headers
        self._instance, self._version = "", 0
        self._open: set[asyncio.Timeout] = set()

    # -- requests ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def until_lost(self) -> AsyncIterator[asyncio.Timeout]:
        """Raises ReplicaLost when the replica is given up; the timeout may be used to leave earlier."""
        if self.is_lost:
            raise ReplicaLost
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._open.add(scope)
                yield scope
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(str(error)) from error
        finally:
            self._open.discard(scope)

    @contextlib.asynccontextmanager
    async def sending(self, method: str, target: str, headers: Mapping[str, str], body: bytes,
                      ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request, and yields the response once its head is there.  For use within `until_lost`.

        Args:
            target: sent as it is: with its dots resolved it might be another route than the one that was checked.
        """
        url = URL(self.url + target, encoded=True)
        async with self._session.request(
                method, url, data=body or None, headers=headers, allow_redirects=False) as response:
            yield response

    async def get(self, target: str) -> tuple[int, bytes]:
        """Asks for something on behalf of the door itself, as `post` does."""
        async with self.until_lost(), self.sending("GET", target, self._headers, b"") as response:
            return response.status, await response.read()

    async def post(self, target: str, body: bytes) -> tuple[int, bytes]:
        """Sends a request of the door itself.  Returns the status and the content of the answer.

        Raises:
            ReplicaLost: the replica failed.
        """
        headers = {**self._headers, "content-type": "application/json"}
        async with self.until_lost(), self.sending("POST", target, headers, body) as response:
            return response.status, await response.read()

    def lose(self) -> None:
        """Everything that waits for the replica ends at once."""
        self.is_lost = True
        for scope in list(self._open):
            end(scope)

    # -- its reports -------------------------------------------------------------------------------------------

    async def poll(self) -> ReplicaState:
        """Asks the replica for its state; its index comes as changes since the last answer.

        Raises:
            ReplicaLost: it does not answer, or not as a replica does.
        """
        target = f"/replica?instance={self._instance}&since={self._version}"
        try:
            async with asyncio.timeout(POLL_TIMEOUT), self.until_lost(), self.sending(
                    "GET", target, self._headers, b"") as response:
                answer = await response.read()
                if response.status != 200:
                    raise ReplicaLost(f"GET /replica was answered with {response.status}: {answer[:200]!r}")
            state = msgspec.json.decode(answer, type=ReplicaState)
        except (TimeoutError, msgspec.DecodeError) as error:
            raise ReplicaLost(str(error) or "no answer") from error
        self._instance, self._version = state.instance, state.version
        self.heard = asyncio.get_running_loop().time()
        self.adapters = {one.name: one for one in state.adapters}
        return state


def end(scope: asyncio.Timeout) -> None:
    """Ends what waits within `scope`, with TimeoutError."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


# -- from an HTTP request to what a router knows of it -----------------------------------------------------------------


class RoutedPrompt(NamedTuple):
    """What is read of a body, whichever replica it is sent to."""

    num_bytes: int
    pieces: tuple[int, ...]
    session: str
    previous_response_id: str
    model: str = ""  # as the client names it

    @property
    def header(self) -> str:
        """The value of `X-Slotwise-Prefix`."""
        return written(self.num_bytes, self.pieces)

    def request(self, request_id: str, piece_tokens: float, adapters: Collection[str]) -> RoutedRequest:
        """Args:
            piece_tokens: mean tokens of a piece, as replicas report; 0: none has reported.
            adapters: those of all replicas.
        """
        piece = piece_tokens or PIECE / BYTES_PER_TOKEN
        return RoutedRequest(request_id, max(1.0, self.num_bytes / PIECE * piece), self.pieces, piece, self.session,
                             self.model if self.model in adapters else "")


def prompt_of(body: bytes, tenant: str, headers: Mapping[bytes, bytes]) -> RoutedPrompt:
    """Reads the fields of a body that make its prompt; a body that is not a JSON object has none, and is refused later.

    Args:
        tenant: prompts of different tenants share nothing.
    """
    try:
        fields: dict[str, msgspec.Raw] = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        fields = {}
    salts = [bytes(fields[name]).decode(errors="replace") if name in fields else "" for name in SALTS]
    salt = "\0".join([tenant, *salts])
    parts = [part for name in PROMPT_FIELDS if name in fields for part in (ELEMENT, _content(bytes(fields[name])))]
    session = headers.get(SESSION_HEADER, b"").decode("latin-1") or next(_texts(fields, SESSIONS), "")
    return RoutedPrompt(sum(map(len, parts)), digests(salt, parts), f"{tenant}:{session}" if session else "",
                  next(_texts(fields, ("previous_response_id",)), ""), next(_texts(fields, ("model",)), ""))


def _content(raw: bytes) -> bytes:
    """A list without its closing bracket: a conversation that goes on begins with the one before."""
    return raw.rstrip().removesuffix(b"]") if raw.startswith(b"[") else raw


def _texts(fields: Mapping[str, msgspec.Raw], names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name in fields:
            try:
                yield msgspec.json.decode(fields[name], type=str)
            except msgspec.DecodeError:  # the replica says what is wrong with it
                continue


# -- what is sent to a replica, and what comes back --------------------------------------------------------------------


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


class ReplicaRefusal(Exception):
    """The replica has answered with an error that another one need not give."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def target_of(exchange: HttpExchange) -> str:
    """The path and query of a request, as they were sent."""
    query = exchange.scope["query_string"].decode("latin-1")
    path: bytes = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
    return path.decode("latin-1") + (f"?{query}" if query else "")


def headers_of(exchange: HttpExchange, prompt: RoutedPrompt | None = None) -> dict[str, str]:
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

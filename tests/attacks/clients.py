"""Clients that account for their responses, clients that disconnect early, and one of minimal cost for the overload."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httptools
import msgspec
from benchmarks.server import Metrics, Server

from attacks import ledger
from slotwise.measure.bench.load_generator import BenchTarget
from slotwise.measure.bench.measures import COMPLETED, FAILED, REJECTED, RequestOutcome

PATH = "/v1/completions"
GIVE_UP = 150.0  # seconds after which a request that has not ended counts as lost
SETTLED = 60.0  # seconds after which no request should be left
CANARY = {"prompt": "def main(", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
CANARY_BLOCKS = 1  # of 64 tokens, needed by the canary


class Leave(Exception):
    """This client's own time limit is over."""


@dataclass(slots=True)
class Answer:
    """The outcome of one request.  Times are seconds of `time.perf_counter`."""

    sent: float
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # of each choice
    num_tokens: int = 0
    finish_reason: str = ""
    error: str = ""  # an explicit error
    ends: int = 0
    first: float = 0.0  # the first text
    ended: float = 0.0
    hung_up: bool = False
    unheard: bool = False  # the connection was refused
    broken: str = ""  # why the response has no valid end

    @property
    def fate(self) -> str:
        if self.hung_up:
            return ledger.HUNG_UP
        if self.unheard:
            return ledger.UNHEARD
        return ledger.LOST if self.broken else ledger.fate(self.status, self.ends, self.finish_reason, bool(self.error))

    @property
    def text(self) -> str:
        """The text of all choices, in their order."""
        return "".join(self.texts[index] for index in sorted(self.texts))

    @property
    def tokens(self) -> tuple[str, int]:
        """The text and token count, which must not change."""
        return self.text, self.num_tokens


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a session with one connection per request, so that no idle close loses a request."""
    timeout = aiohttp.ClientTimeout(total=GIVE_UP)
    async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout) as opened:
        yield opened


async def ask(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], leave_after: int = 0,
              path: str = PATH) -> Answer:
    """Sends one streamed request and reads it to its end.

    Args:
        leave_after: events after which this client disconnects; 0: never.
        path: of completions or of chat completions.
    """
    answer = Answer(time.perf_counter())
    content = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.post(server.url + path, json=content) as response:
            answer.status = response.status
            if response.status != 200:
                answer.error = _message(await response.json(content_type=None))
                answer.ends += 1
            else:
                await _read(response, answer, leave_after)
                if answer.ends == _num_choices(body):
                    answer.ends = 1
    except Leave:
        answer.hung_up = True
    except aiohttp.ClientConnectorError:
        answer.unheard = True
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


async def ask_whole(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], path: str = PATH) -> Answer:
    """Sends one request that is not streamed."""
    answer = Answer(time.perf_counter())
    try:
        async with http.post(server.url + path, json=body) as response:
            answer.status = response.status
            event = await response.json(content_type=None)
            _take(event, answer)
            if answer.ends == _num_choices(body):
                answer.ends = 1
    except aiohttp.ClientConnectorError:
        answer.unheard = True
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    return answer


async def ask_briefly(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], seconds: float) -> Answer:
    """Disconnects after `seconds`, most likely before the first token."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(seconds):
            return await ask(http, server, body)
    except TimeoutError:
        return Answer(began, ended=time.perf_counter(), hung_up=True)


async def _read(response: aiohttp.ClientResponse, answer: Answer, leave_after: int) -> None:
    done = False
    num_events = 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            break
        event = json.loads(line[6:])
        num_events += 1
        _take(event, answer)
        if num_events == leave_after:
            response.close()
            raise Leave
    if not done:
        answer.broken = "the stream broke off"


def _take(event: dict[str, Any], answer: Answer) -> None:
    if event.get("error"):
        answer.error = _message(event)
        answer.ends += 1
    for choice in event.get("choices", ()):
        if said := _said(choice):
            answer.first = answer.first or time.perf_counter()
            answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + said
        if choice["finish_reason"]:
            answer.finish_reason = choice["finish_reason"]
            answer.ends += 1
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]


def _said(choice: dict[str, Any]) -> str:
    """Returns the text of a choice of a completion, a chat, or a chunk."""
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def _num_choices(body: dict[str, Any]) -> int:
    """Returns the number of choices: each of several prompts, and each of `n`, has an end of its own."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 1
    return prompts * body.get("n", 1)


def _message(said: dict[str, Any]) -> str:
    return str(said["error"]["message"])


# -- checks beside the load --------------------------------------------------------------------------------------


class Canary:
    """A greedy request that is repeated during the attack, and must return the same tokens each time."""

    def __init__(self, http: aiohttp.ClientSession, server: Server) -> None:
        self.answers: list[Answer] = []
        self._alone = ("", 0)
        self._http, self._server = http, server
        self._stop = False

    @property
    def unchanged(self) -> bool:
        return bool(self.answers) and all(answer.tokens == self._alone for answer in self.answers)

    @asynccontextmanager
    async def singing(self) -> AsyncIterator[Canary]:
        """Sends the canary first alone, then during the block."""
        alone = await ask(self._http, self._server, CANARY)
        self._alone = alone.tokens
        task = asyncio.create_task(self._sing())
        try:
            yield self
        finally:
            self._stop = True
            await task
            self.answers.append(alone)

    async def _sing(self) -> None:
        while not self._stop:
            self.answers.append(await ask(self._http, self._server, CANARY))


async def quiet(http: aiohttp.ClientSession, server: Server, but: int = 0) -> float:
    """Returns the seconds until at most `but` requests run or wait; at least `SETTLED` if that does not happen."""
    began = time.perf_counter()
    while (await Metrics.read(http, server)).num_inside > but and time.perf_counter() - began < SETTLED:
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


async def leaked(http: aiohttp.ClientSession, server: Server) -> int:
    """Returns the blocks without an unfinished request: those in use beside a request of one block.

    An idle server's metrics do not show its cache, so they are read while that request runs alone.
    """
    for _ in range(20):
        task = asyncio.create_task(ask(http, server, CANARY | {"prompt": [5], "max_tokens": 60}))
        reading = await Metrics.read(http, server)
        while not task.done() and not reading["num_requests_running"]:
            reading = await Metrics.read(http, server)
        await task
        if reading["num_requests_running"] == 1:
            return ledger.leaked_blocks(reading["kv_cache_usage_perc"], server.num_blocks, CANARY_BLOCKS)
    raise RuntimeError(f"no reading of the cache with one request in it, but with {reading.num_inside:g}: "
                       f"{await health(http, server)}; the server's log: {server.said()}")


async def health(http: aiohttp.ClientSession, server: Server) -> tuple[int, dict[str, Any]]:
    """Returns status and body of `/health`; status 0: no response."""
    try:
        async with http.get(f"{server.url}/health") as response:
            return response.status, await response.json(content_type=None)
    except (aiohttp.ClientError, OSError):
        return 0, {}


class HealthWatch:
    """Polls `/health`: (seconds, status, body) of each response."""

    def __init__(self, http: aiohttp.ClientSession, server: Server) -> None:
        self.seen: list[tuple[float, int, dict[str, Any]]] = []
        self._http, self._server = http, server

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[HealthWatch]:
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            status, body = await health(self._http, self._server)
            self.seen.append((time.perf_counter(), status, body))
            await asyncio.sleep(0.02)

    def first(self, status: int, since: float) -> float:
        """Returns the seconds from `since` to the first response with `status`; infinite without one."""
        return min((at - since for at, seen, _ in self.seen if at >= since and seen == status), default=float("inf"))

    async def until(self, status: int, since: float, limit: float) -> float:
        """Waits for the first response with `status` after `since`."""
        while self.first(status, since) == float("inf") and time.perf_counter() - since < limit:
            await asyncio.sleep(0.02)
        return self.first(status, since)


SILENT = 300.0  # seconds without a byte after which a response is aborted


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Last(msgspec.Struct):
    usage: _Usage


_last = msgspec.json.Decoder(_Last).decode


class LeanClient:
    """One connection per active request; connections are reused."""

    def __init__(self, target: BenchTarget, clock: Callable[[], float]) -> None:
        place = urlsplit(target.base_url)
        self._address = (place.hostname or "", place.port or 80)
        self._head = (f"POST {target.endpoint} HTTP/1.1\r\nHost: {place.netloc}\r\n"
                      "Content-Type: application/json\r\nContent-Length: ").encode()
        self._clock = clock
        self._idle: list[_Connection] = []

    async def complete(self, body: bytes, reply: RequestOutcome) -> None:
        """Sends `body` and writes the response or its failure into `reply`."""
        reply.sent = self._clock()
        try:
            connection = await self._free()
            await asyncio.wait_for(connection.ask(self._head + b"%d\r\n\r\n%b" % (len(body), body), reply), SILENT)
            if connection.is_open:
                self._idle.append(connection)
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            reply.status, reply.error = FAILED, f"{type(error).__name__}: {error}"
        reply.ended = reply.ended or self._clock()

    async def _free(self) -> _Connection:
        """Returns an open connection, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._clock), *self._address)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """A connection with one response at a time."""

    is_open = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.is_open = True

    def ask(self, request: bytes, reply: RequestOutcome) -> asyncio.Future[None]:
        self._reply, self._rest = reply, b""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)  # type: ignore[attr-defined]
        return self._ended

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(error or ConnectionError("closed before the answer ended"))

    def _end(self, error: Exception | None = None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    # -- parser callbacks ----------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        reply = self._reply
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                reply.status = COMPLETED
            elif b'"choices":[]' in event:
                reply.num_output = _last(event.removeprefix(b"data: ")).usage.completion_tokens
            elif b'"error":{' in event:
                reply.error = event.decode()
            else:
                reply.token_times.append(self._clock())

    def on_message_complete(self) -> None:
        reply, status = self._reply, self._parser.get_status_code()
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if status != 200:
            reply.status = REJECTED if 400 <= status < 500 or status == 503 else FAILED
            reply.error = f"{status}: {self._rest.decode(errors='replace')[:200]}"
        elif reply.status != COMPLETED or reply.error or not reply.num_output:
            reply.status = FAILED
            reply.error = reply.error or "the stream ended before the answer did"
        self._end()

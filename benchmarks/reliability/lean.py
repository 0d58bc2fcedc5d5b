"""A client of minimal cost: the load generator shares two cores with the server.

It supports one server, one route and two kinds of responses: a stream of completion events, and an error.  It counts an
event that is neither the last nor usage as a token; `bench.load_generator` is more exact, at three times the cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools
import msgspec

from slotwise.bench.load_generator import BenchTarget
from slotwise.bench.measures import COMPLETED, FAILED, REJECTED, RequestOutcome

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

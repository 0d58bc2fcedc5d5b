"""An HTTP exchange as data: the bytes sent to a socket, their times, the expected outcome; and how responses are read.

Bytes are text in which each character is a byte (latin-1), so that an exchange is a line of JSON; `HOST` in them is
replaced by the server's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MOST = 64 << 20  # bytes of one response
KEPT = 300  # bytes of a body, for messages
NO_BODY = (204, 304)


class Responses:
    """The responses of a server on one connection.

    Args:
        without_bodies: the requests are HEAD.
    """

    def __init__(self, without_bodies: bool = False) -> None:
        self.statuses: list[int] = []
        self.whole = 0
        self.closed = False
        self.garbage = ""
        self._without_bodies = without_bodies
        self._data = b""
        self._left: int | None = None  # bytes of a body of known length; None: between two responses
        self._chunked = self._until_closed = False
        self._kept = b""
        self._news = asyncio.Event()

    async def something(self, seconds: float) -> None:
        """Waits until more data arrives, or the time is over."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)

    def latest(self) -> str:
        return self._kept.decode("latin-1")

    def feed(self, data: bytes) -> None:
        """Parses `data`; empty: the server closed."""
        self._news.set()
        if not data:
            self.closed = True
            if self._until_closed:
                self._until_closed = False
                self.whole += 1
            return
        self._data += data
        while not self.garbage and self._advance():
            pass

    def _advance(self) -> bool:
        """Parses the next element.  Returns False if it is incomplete."""
        if self._until_closed:
            self._kept = (self._kept + self._data)[:KEPT]
            self._data = b""
            return False
        if self._left is not None:
            return self._body()
        if self._chunked:
            return self._chunk()
        return self._head()

    def _head(self) -> bool:
        if not self._data:
            return False
        if not b"HTTP/1.1 ".startswith(self._data[:9]):
            self.garbage = repr(self._data[:80])
            return False
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return False
        lines = head.split(b"\r\n")
        try:
            status = int(lines[0].split(b" ")[1])
            named = [line.split(b":", 1) for line in lines[1:]]
            headers = {name.lower(): value.strip() for name, value in named}
        except (ValueError, IndexError):
            self.garbage = repr(head[:80])
            return False
        self._data, self._kept = rest, b""
        if 100 <= status < 200:
            return True
        self.statuses.append(status)
        if self._without_bodies or status in NO_BODY:
            self.whole += 1
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            self._body()
        elif headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._chunked = True
        else:
            self._until_closed = True
        return True

    def _body(self) -> bool:
        assert self._left is not None
        taken, self._data = self._data[:self._left], self._data[self._left:]
        self._kept = (self._kept + taken)[:KEPT]
        self._left -= len(taken)
        if self._left:
            return False
        self._left = None
        self.whole += 1
        return True

    def _chunk(self) -> bool:
        line, end, rest = self._data.partition(b"\r\n")
        if not end:
            return False
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            self.garbage = f"chunk size {line[:40]!r}"
            return False
        if len(rest) < size + 2:
            return False
        self._kept = (self._kept + rest[:size])[:KEPT]
        self._data = rest[size + 2:]
        if not size:
            self._chunked = False
            self.whole += 1
        return True


HOST = "{{HOST}}"
ANSWERED = "answered"  # complete requests: as many complete responses
BEGUN = "begun"  # a request with an endless response: the response's head
SETTLED = "settled"  # a response, or a closed connection
ANYTHING = "anything"  # abandoned or incomplete requests
LIMIT = 10.0  # seconds after the last byte within which the expectation must hold
SENDING = 30.0  # seconds for which the server may leave the client's bytes unread
ALLOWED = (501, 503, 504, 505)  # of 5xx: not implemented, overloaded, queue timeout, HTTP version

Action = list[Any]
"""[name, argument ...]: send TEXT, repeat TEXT COUNT, pause SECONDS, half_close, reset, close, read SECONDS."""


@dataclass(frozen=True)
class Exchange:
    """The hostile traffic of one connection.

    Args:
        name: of its kind.
        actions: in order; responses are read during and after them.
        expect: one of the above.
        answers: the number of responses, for `ANSWERED`.
    """

    name: str
    actions: list[Action]
    expect: str = SETTLED
    answers: int = 1

    def as_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Exchange:
        known = json.loads(line)
        return cls(**{name: known[name] for name in ("name", "actions", "expect", "answers")})

    @property
    def is_head(self) -> bool:
        """Whether responses have no body."""
        return bool(self.actions) and str(self.actions[0][1]).startswith("HEAD ")


@dataclass
class Outcome:
    """The outcome of an exchange."""

    statuses: list[int] = field(default_factory=list)  # of responses that have begun
    whole: int = 0  # complete responses
    closed: bool = False  # by the server
    garbage: str = ""  # bytes that are not HTTP
    began: float = 0.0  # `time.perf_counter`
    ended: float = 0.0
    body: str = ""  # the beginning of the last body

    def objection(self, exchange: Exchange, limit: float = LIMIT) -> str:
        """Returns the broken law; empty: none."""
        if self.garbage:
            return f"no HTTP: {self.garbage}"
        if bad := [status for status in self.statuses if status >= 500 and status not in ALLOWED]:
            return f"status {bad[0]}: {self.body}"
        seconds = f"within {limit:g} s, after {self.ended - self.began:.1f} s in all"
        if exchange.expect == ANSWERED and self.whole < exchange.answers:
            how = "closed" if self.closed else "silent"
            return f"{self.whole} of {exchange.answers} answers {seconds} ({how}; {self.statuses})"
        if exchange.expect == BEGUN and not self.statuses:
            return f"no answer begun {seconds} ({'closed' if self.closed else 'silent'})"
        if exchange.expect == SETTLED and not self.whole and not self.closed:
            return f"neither answered nor closed {seconds}"
        return ""

    @property
    def has_an_excuse(self) -> bool:
        """Whether a lost engine explains it: errors and late responses, but neither garbage nor a silent parser."""
        return not self.garbage


async def play(url: str, exchange: Exchange, source: str = "127.0.0.1", limit: float = LIMIT) -> Outcome:
    """Plays an exchange from the address `source`; waits `limit` seconds after the last byte for its expectation.

    Raises:
        OSError: no connection is possible.
    """
    place, loop = urlsplit(url), asyncio.get_running_loop()
    outcome = Outcome(began=time.perf_counter())
    with socket.socket() as one:
        one.setblocking(False)
        with contextlib.suppress(OSError):  # another address than the default, if there is one
            one.bind((source, 0))
        await asyncio.wait_for(loop.sock_connect(one, (place.hostname or "", place.port or 0)), SENDING)
        responses = Responses(exchange.is_head)
        reading = asyncio.create_task(_read(one, responses))
        try:
            stays = await _act(one, exchange, place.netloc, responses)
            if stays:
                await _wait(reading, exchange, responses, limit)
        except (ConnectionError, TimeoutError, OSError):
            with contextlib.suppress(asyncio.CancelledError):  # the rest of the response
                await asyncio.wait([reading], timeout=1.0)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    outcome.statuses, outcome.whole, outcome.garbage = responses.statuses, responses.whole, responses.garbage
    outcome.closed, outcome.body, outcome.ended = responses.closed, responses.latest(), time.perf_counter()
    return outcome


async def _act(one: socket.socket, exchange: Exchange, host: str, responses: Responses) -> bool:
    """Performs the actions.  Returns whether the connection is still readable."""
    loop = asyncio.get_running_loop()
    for name, *arguments in exchange.actions:
        match name:
            case "send":
                await asyncio.wait_for(loop.sock_sendall(one, _bytes(arguments[0], host)), SENDING)
            case "repeat":
                data = _bytes(arguments[0], host) * arguments[1]
                await asyncio.wait_for(loop.sock_sendall(one, data), SENDING)
            case "pause":
                await asyncio.sleep(arguments[0])
            case "half_close":
                one.shutdown(socket.SHUT_WR)
            case "read":
                await responses.something(arguments[0])
            case "reset":
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            case "close":
                return False
            case _:
                raise ValueError(f"no such action: {name}")
    return True


def _bytes(text: str, host: str) -> bytes:
    return text.replace(HOST, host).encode("latin-1")


async def _read(one: socket.socket, responses: Responses) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = await loop.sock_recv(one, 1 << 16)
        except OSError:
            data = b""
        responses.feed(data)
        if not data:
            return


async def _wait(reading: asyncio.Task[None], exchange: Exchange, responses: Responses, limit: float) -> None:
    """Waits until the expectation holds or cannot hold any more."""
    end = time.perf_counter() + limit
    while not reading.done() and (left := end - time.perf_counter()) > 0 and not _is_there(exchange, responses):
        await responses.something(min(left, 0.5))


def _is_there(exchange: Exchange, responses: Responses) -> bool:
    if exchange.expect == ANSWERED:
        return responses.whole >= exchange.answers
    if exchange.expect == BEGUN:
        return bool(responses.statuses)
    if exchange.expect == SETTLED:
        return responses.whole > 0
    return True


def read_corpus(path: Path) -> list[Exchange]:
    return [Exchange.of_line(line) for line in path.read_text().splitlines() if line.strip()]


def add_to_corpus(path: Path, exchanges: Iterable[Exchange]) -> int:
    """Appends new exchanges to the corpus.  Returns their number."""
    known = set(path.read_text().splitlines()) if path.exists() else set()
    new = [line for line in dict.fromkeys(one.as_line() for one in exchanges) if line not in known]
    with path.open("a") as file:
        file.writelines(line + "\n" for line in new)
    return len(new)

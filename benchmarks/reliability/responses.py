"""Parses the responses on one connection: their statuses and their ends.

The parser is strict, because it judges a server: bytes that do not begin an HTTP response are garbage.
"""

from __future__ import annotations

import asyncio
import contextlib

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

"""One client's HTTP connection, as uvicorn speaks it, and what it is not to do to others.

A head that grows beyond all use is cut off; a response's head goes out together with what follows it.
"""

from __future__ import annotations

from asyncio import Transport
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 512 << 10  # bytes; the socket is read in pieces of up to half of it
INTERIM = b"HTTP/1.1 1"  # how a response begins that only says to go on
FINAL = b"HTTP/1.1 "


class Connection(HttpToolsProtocol):
    """Closes itself when its headers grow beyond all use: copying them would stall every stream."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head: int | None = 0  # bytes received of an unfinished head; None within a body

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(Transport, _HeadJoined(transport)))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.transport.close()

    def on_headers_complete(self) -> None:
        self.scope["transport"] = self.transport  # for the application, which has no other way to it
        super().on_headers_complete()
        self._head = None

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head = 0

    def on_response_complete(self) -> None:
        cast(_HeadJoined, self.transport).flush()  # nothing follows where the head alone was asked for
        super().on_response_complete()


class _HeadJoined:
    """A transport that keeps a response's head until its body comes, which the application always has at hand.

    A refused client then wakes once, not twice, and so does the processor that it shares with the engine.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(FINAL) and data.endswith(b"\r\n\r\n") and not data.startswith(INTERIM):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""Joins the head of a response and its body in one write."""

from __future__ import annotations

from asyncio import Transport
from typing import Any

INTERIM = b"HTTP/1.1 1"  # how an interim response begins
FINAL = b"HTTP/1.1 "


class HeadJoined:
    """A transport that holds a response's head until its body, which the application always has at hand.

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

"""Blocks over TCP, between hosts."""

from __future__ import annotations

import contextlib
import socket

from slotwise.transfer.frames import StreamWire

BACKLOG = 128


class TCPConnector:
    """Args: block_bytes: of every block; timeout: seconds for which a send or receive may wait."""

    def __init__(self, block_bytes: int, timeout: float) -> None:
        self._block_bytes = block_bytes
        self._timeout = timeout

    def listen(self, host: str, port: int) -> TCPListener:
        return TCPListener(host, port, self._block_bytes, self._timeout)

    def connect(self, host: str, port: int, timeout: float) -> StreamWire:
        stream = socket.create_connection((host, port), timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return StreamWire(stream, self._block_bytes, self._timeout)


class TCPListener:
    def __init__(self, host: str, port: int, block_bytes: int, timeout: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._block_bytes = block_bytes
        self._timeout = timeout

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def accept(self) -> StreamWire:
        stream, _ = self._listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return StreamWire(stream, self._block_bytes, self._timeout)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()

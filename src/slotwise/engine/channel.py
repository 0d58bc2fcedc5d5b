"""A bounded, two-way message channel over a Unix socket pair: four bytes of length, then MessagePack.

The socket buffer is the bound: the engine blocks when the API process is that far behind, so unsent tokens do not
accumulate in memory.
"""

from __future__ import annotations

import select
import socket
import struct
import threading

HEADER = struct.Struct("<I")
MAX_MESSAGE = 64 << 20  # bytes; a prompt of a million tokens takes about 5 MB
BUFFER = 4 << 20  # bytes requested from the kernel for each direction


class ChannelClosed(Exception):
    """The process at the other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected ends, one for each process."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return ends


def frame(message: bytes) -> bytes:
    """Returns the bytes of one message as sent: its length, then the message."""
    return HEADER.pack(len(message)) + message


class Unframer:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages completed by `data`.

        Raises:
            ChannelClosed: the other end announces a message larger than `MAX_MESSAGE`.
        """
        self._bytes += data
        messages, at = [], 0
        while len(self._bytes) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes, at)
            if length > MAX_MESSAGE:
                raise ChannelClosed(f"a message of {length} bytes")
            end = at + HEADER.size + length
            if len(self._bytes) < end:
                break
            messages.append(bytes(self._bytes[at + HEADER.size : end]))
            at = end
        del self._bytes[:at]
        return messages


class BlockingChannel:
    """The engine's end: polled for commands between steps, waited on only when nothing runs.

    Any thread may send; one receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unframer = Unframer()
        self._sending = threading.Lock()
        self._readable = select.poll()  # select() knows no descriptor beyond 1,023, which a busy server may give out
        self._readable.register(sock, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Raises ChannelClosed when the other end is gone."""
        try:
            with self._sending:
                self._sock.sendall(frame(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None) -> list[bytes]:
        """Returns the messages that arrived, after up to `timeout` seconds for the first (None: without end).

        Raises ChannelClosed when the other end is gone.
        """
        if not self._readable.poll(None if timeout is None else 1000 * timeout):
            return []
        try:
            data = self._sock.recv(1 << 20)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of stream")
        return self._unframer.feed(data)

"""Inter-process communication: messages over a Unix socket pair, four bytes of length, then MessagePack.

    API process    EngineConnection (asyncio)  ──commands──►  BlockingChannel    engine process
                                               ◄──reports───

The socket buffer is the bound: the engine blocks when the API process is that far behind, so unsent tokens do not
accumulate in memory.  Nothing received can run code.  The offline API, which needs no msgspec, does not import this.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from slotwise.engine.messages import Command, EngineFailed, Heartbeat, Query, Report, StepRecord

if TYPE_CHECKING:
    from slotwise.engine.heartbeat import HeartbeatMonitor

HEADER = struct.Struct("<I")
MAX_MESSAGE = 64 << 20  # bytes; a prompt of a million tokens takes about 5 MB
BUFFER = 4 << 20  # bytes requested from the kernel for each direction

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command | Query).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class ChannelClosed(Exception):
    """The process at the other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected ends, one for each process."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    return ends


def frame(message: bytes) -> bytes:
    """Returns the bytes of one message as sent: its length, then the message.

    Raises:
        ValueError: it is larger than `MAX_MESSAGE`; the other end would refuse it, and all that follows.
    """
    if len(message) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(message)} bytes is too large to be sent: at most {MAX_MESSAGE} are")
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
        """Raises ChannelClosed when the other end is gone, and ValueError for a message beyond `MAX_MESSAGE`."""
        data = frame(message)
        try:
            with self._sending:
                self._sock.sendall(data)
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


class EngineConnection(asyncio.Protocol):
    """The API process' end: commands out, reports in, closed once.  `connect` opens it.

    Args:
        heartbeat: notified of all data, heartbeats and steps.
        on_report: receives every report except heartbeats and `EngineFailed`.
        on_lost: called once with the reason when the engine is lost; no report follows.
    """

    def __init__(
        self, heartbeat: HeartbeatMonitor, on_report: Callable[[Report], None], on_lost: Callable[[str], None],
    ) -> None:
        self.heartbeat = heartbeat
        self.lost = False
        self._on_report = on_report
        self._on_lost = on_lost
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None

    async def connect(self, sock: socket.socket) -> None:
        """Take `sock`, one end of `pair()`, which this connection then owns and closes."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    @property
    def num_unsent(self) -> int:
        """Bytes of commands that the engine has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, command: Command | Query) -> int:
        """Never waits: unread commands stay in the transport's buffer.  Returns the bytes written."""
        if self._transport is None or self.lost:
            return 0
        data = frame(encode(command))
        self._transport.write(data)
        return len(data)

    def cut(self, message: str) -> None:
        """Closes the connection for the reason `message`; drops unsent commands.  The engine process then ends."""
        if self.lost:
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(message)

    # -- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the interface, not the class

    def data_received(self, data: bytes) -> None:
        self.heartbeat.heard()
        try:
            for message in self._unframer.feed(data):
                if not self.lost:
                    self._dispatch(decode_report(message))
        except (ChannelClosed, ValueError) as error:  # msgspec's are ValueErrors, as are columns of unequal length
            self.cut(f"the engine sent what cannot be read ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut("the engine process ended" + (f" ({exc})" if exc else ""))

    def _dispatch(self, report: Report) -> None:
        if isinstance(report, Heartbeat):
            self.heartbeat.on_heartbeat(report.step_ns)
        elif isinstance(report, EngineFailed):
            self.cut(report.message)
        else:
            if isinstance(report, StepRecord):
                self.heartbeat.stepped()
            self._on_report(report)

"""The API process' connection to one engine process: commands out, reports in, closed once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from slotwise.engine.channel import ChannelClosed, Unframer, frame
from slotwise.engine.heartbeat import HeartbeatMonitor
from slotwise.engine.messages import Command, EngineFailed, Heartbeat, QueuePositionQuery, Report, StepRecord
from slotwise.engine.wire import decode_report, encode


class Link(asyncio.Protocol):
    """The protocol of the connection; `linked` connects it.

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

    @property
    def num_unsent(self) -> int:
        """Bytes of commands that the engine has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, command: Command | QueuePositionQuery) -> None:
        """Never waits: unread commands stay in the transport's buffer."""
        if self._transport is not None and not self.lost:
            self._transport.write(frame(encode(command)))

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


async def linked(sock: socket.socket, link: Link) -> None:
    """Connects `link` to `sock`, one end of `channel.pair()`, which `link` then owns and closes."""
    sock.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)

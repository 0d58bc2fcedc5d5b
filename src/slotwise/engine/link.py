"""One life of an engine, from the API process' side of its channel: commands out, reports in, and one end."""

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
    """Made by `linked`.

    Args:
        heartbeat: told of every sign of life.
        on_report: told of every report but beats and the last.
        on_lost: told once why the engine is gone; nothing is reported after that.
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
        """Bytes of commands that the engine has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, command: Command | QueuePositionQuery) -> None:
        """Never waits: what the engine has not read yet stays in the transport's buffer."""
        if self._transport is not None and not self.lost:
            self._transport.write(frame(encode(command)))

    def cut(self, message: str) -> None:
        """End it, for the reason `message`; what is unsent is dropped.  The process ends when its channel does."""
        if self.lost:
            return
        self.lost = True
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(message)

    # -- called by the event loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

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
    """Put `link` on `sock`, one end of `channel.pair()`, which it takes over and closes."""
    sock.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)

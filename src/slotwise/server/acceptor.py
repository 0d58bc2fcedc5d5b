"""Accepts connections, a few in each pass of the event loop.

The event loop's own server accepts all that wait in one pass: a thousand clients that connect at once would stall every
stream for as long as it takes to set up a thousand connections.  Here the rest waits in the kernel's backlog while the
loop serves those that are open.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from slotwise.throttled_warning import ThrottledWarning

AT_ONCE = 16  # connections accepted in one pass: some 6 ms
RETRY_AFTER = 1.0  # seconds without accepting after the process has run out of files or memory
GRACE = 1.0  # seconds that handshakes in progress have at the end

logger = logging.getLogger(__name__)
Connect = Callable[[asyncio.AbstractEventLoop, socket.socket], Awaitable[object]]


def plain(protocol: Callable[[], asyncio.Protocol]) -> Connect:
    """Returns what begins a connection without TLS.  Args: protocol: makes the protocol of a connection."""
    return lambda loop, accepted: loop.connect_accepted_socket(protocol, accepted)


class Acceptor:
    """Accepts on a listening socket until it is closed.

    Args:
        listener: listens already.
        connect: begins a connection; raises OSError where it has failed.
        at_once: connections accepted in one pass.
    """

    def __init__(self, listener: socket.socket, connect: Connect, at_once: int = AT_ONCE) -> None:
        self._listener, self._connect, self._at_once = listener, connect, at_once
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._failures = ThrottledWarning(logger)
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more.  Open connections are not affected."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait until the connections accepted before are set up.  A handshake that takes long is given up."""
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=GRACE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            task = self._loop.create_task(self._begin(accepted))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        logger.warning("no connection can be accepted for %g s: %s", RETRY_AFTER, error)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_AFTER, self._resume)

    async def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._connect(self._loop, accepted)
        except OSError as error:  # the client has left, or the two do not agree on TLS
            accepted.close()
            if not isinstance(error, ConnectionError):
                self._failures.warn(f"a connection could not begin: {error}")

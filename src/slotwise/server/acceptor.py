"""Accepts connections, a few in each pass of the event loop.

The event loop's own server accepts all that wait in one pass: a thousand clients that connect at once would stall every
stream for as long as it takes to set up a thousand connections.  Here the rest waits in the kernel's backlog while the
loop serves those that are open.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

AT_ONCE = 16  # connections accepted in one pass: some 6 ms
RETRY_AFTER = 1.0  # seconds without accepting after the process has run out of files or memory

logger = logging.getLogger(__name__)


class Acceptor:
    """Accepts on a listening socket until it is closed.

    Args:
        listener: listens already.
        protocol: makes the protocol of a connection.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._protocol = listener, protocol
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more.  Open connections are not affected."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait until the connections accepted before are set up."""
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            task = self._loop.create_task(self._connect(accepted))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        logger.warning("no connection can be accepted for %g s: %s", RETRY_AFTER, error)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_AFTER, self._resume)

    async def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError:  # the client has left
            accepted.close()

"""Bodies of requests: how much memory those under way may take, counted before it is taken.

A body is counted from the moment its length is known, or as it comes, until its prompts are token ids.  The bound is a
room that tenants share, or the addresses of clients where there are no keys (see engine.room).  Small bodies are not
counted: the number of connections bounds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from slotwise.engine.tenant_capacity import TenantCapacity
from slotwise.server.connections import client_of
from slotwise.server.errors import ApiError
from slotwise.server.http_exchange import STEP, HttpExchange
from slotwise.server.settings import ServerSettings

MOST = 256 << 20  # bytes
LEAST_BODIES = 4  # of the largest size, that are taken at once
SMALL = 64 << 10  # bytes of a body that is not counted
GIVE_BACK = 32 << 20  # bytes of bodies after which freed memory is given back: a millisecond or two


class Bodies:
    """Reads bodies."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._most = max(MOST, LEAST_BODIES * (settings.max_body_bytes + STEP))
        self._room = TenantCapacity("bytes of bodies are on their way")
        self._freed = 0  # bytes, since memory was last given back
        self._trim = _trim()

    @asynccontextmanager
    async def reading(self, exchange: HttpExchange, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """A request's body, for as long as it or what was decoded from it is needed.

        Args:
            max_bytes: that it may have, where it may not be as large as any.

        Raises:
            ApiError: it is too large or too slow, or there are too many at once.
            ClientGone: it does not come to its end.
        """
        client = exchange.scope.get("client") or ("",)
        holder, held = exchange.tenant or client_of(client[0]), 0

        def claim(size: int) -> None:
            nonlocal held
            if size <= max(SMALL, held):
                return
            if objection := self._room.objection(holder, size - held, self._most):
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"too much is being sent: {objection}",
                               code="bodies_full")
            self._room.take(holder, size - held)
            held = size

        try:
            most = self._max_bytes if max_bytes is None else max_bytes
            yield await exchange.body(most, self._timeout, claim)
        finally:
            if held:
                self._room.give(holder, held)
                self._give_back(held)

    def _give_back(self, num_bytes: int) -> None:
        self._freed += num_bytes
        if self._freed >= GIVE_BACK:
            self._freed = 0
            self._trim()


def _trim() -> Callable[[], object]:
    """The C library keeps what was freed in pieces; glibc can be told to give it back."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: trim(0)) if trim is not None else (lambda: None)

"""Request bodies, with a bound on their memory that is checked before the memory is allocated.

A body counts from the moment its length is known, or as it arrives, until its prompts are token ids; once it is read,
so do the values it is decoded to, which may take twenty times its bytes.  The bound is shared by tenants, or by client
addresses where there are no keys (see engine.tenant_capacity).  Small bodies do not count: the number of connections
bounds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from slotwise.engine.tenant_capacity import TenantCapacity
from slotwise.server.body_precheck import MAX_VALUES
from slotwise.server.connections import client_of
from slotwise.server.errors import ApiError
from slotwise.server.http_exchange import STEP, HttpExchange
from slotwise.server.settings import ServerSettings

MOST = 256 << 20  # bytes
LEAST_BODIES = 4  # bodies of the largest size that fit at once
VALUE = 64  # bytes of a decoded value
SMALL = 64 << 10  # bytes of a body that does not count
GIVE_BACK = 32 << 20  # bytes of bodies after which freed memory is returned to the system: a millisecond or two


class Bodies:
    """Reads bodies within the bound."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._most = max(MOST, LEAST_BODIES * (settings.max_body_bytes + STEP + VALUE * MAX_VALUES))
        self._capacity = TenantCapacity("bytes of bodies are on their way", self._most)
        self._freed = 0  # bytes since memory was last returned
        self._trim = _trim()

    @asynccontextmanager
    async def reading(self, exchange: HttpExchange, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """The body of a request, counted until the context ends.

        Args:
            max_bytes: a smaller bound than that of any body.

        Raises:
            ApiError: it is too large or too slow, or there are too many at once.
            ClientGone: the client disconnected before its end.
        """
        client = exchange.scope.get("client") or ("",)
        holder, held = exchange.tenant or client_of(client[0]), 0

        def claim(size: int) -> None:
            nonlocal held
            if size <= max(SMALL, held):
                return
            if objection := self._capacity.objection(holder, size - held):
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"too much is being sent: {objection}",
                               code="bodies_full")
            self._capacity.acquire(holder, size - held)
            held = size

        try:
            most = self._max_bytes if max_bytes is None else max_bytes
            body = await exchange.body(most, self._timeout, claim)
            claim(len(body) + VALUE * _num_values(body))
            yield body
        finally:
            if held:
                self._capacity.release(holder, held)
                self._give_back(held)

    def _give_back(self, num_bytes: int) -> None:
        self._freed += num_bytes
        if self._freed >= GIVE_BACK:
            self._freed = 0
            self._trim()


def _num_values(body: bytes) -> int:
    """At most how many values a body holds, up to what the decoder accepts beside token ids and texts."""
    return min(MAX_VALUES, body.count(b",") + body.count(b"[") + body.count(b"{"))


def _trim() -> Callable[[], object]:
    """Returns glibc's `malloc_trim`, which returns freed memory to the system; a no-op elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: trim(0)) if trim is not None else (lambda: None)

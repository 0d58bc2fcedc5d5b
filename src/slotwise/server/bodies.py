"""Request bodies, with a bound on their memory that is checked before the memory is allocated.

A body counts from the moment its length is known, or as it arrives, until its prompts are token ids; once it is read,
so do the values it is decoded to, which may take twenty times its bytes.  The bound is shared by tenants, or by client
addresses where there are no keys (see core.tenant_capacity).  Small bodies do not count: the number of connections
bounds them.

A body may be packed with gzip.  Packed and unpacked it has the same bound, and both count: what it unpacks to is known
only as it is unpacked, a piece at a time, with other work of the event loop in between.
"""

from __future__ import annotations

import asyncio
import ctypes
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from slotwise.core.tenant_capacity import TenantCapacity
from slotwise.server.body_precheck import MAX_VALUES
from slotwise.server.errors import ApiError, bad_request
from slotwise.server.http_exchange import STEP, HttpExchange, too_large
from slotwise.server.settings import ServerSettings

MOST = 256 << 20  # bytes
LEAST_BODIES = 4  # bodies of the largest size that fit at once
VALUE = 64  # bytes of a decoded value
SMALL = 64 << 10  # bytes of a body that does not count
GIVE_BACK = 32 << 20  # bytes of bodies after which freed memory is returned to the system: a millisecond or two
GZIP = (b"gzip", b"x-gzip")  # RFC 9110, 8.4.1.3
GZIP_FORMAT = 16 + zlib.MAX_WBITS  # zlib's number for it

Claim = Callable[[int], None]
Unpack = Callable[[bytes, int, Claim], Awaitable[bytes]]


class Bodies:
    """Reads bodies within the bound."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_bytes = settings.max_body_bytes
        self._timeout = settings.body_timeout
        self._most = max(MOST, LEAST_BODIES * (settings.max_body_bytes + STEP + VALUE * MAX_VALUES))
        self._capacity = TenantCapacity("bytes of bodies are on their way", self._most)
        self._freed = 0  # bytes since memory was last returned
        self._turn = asyncio.Lock()  # a pass of the event loop is begun for each large body
        self._trim = _trim()

    @asynccontextmanager
    async def reading(self, exchange: HttpExchange, max_bytes: int | None = None) -> AsyncIterator[bytes]:
        """The body of a request, counted until the context ends.

        Args:
            max_bytes: a smaller bound than that of any body.

        Raises:
            ApiError: it is too large or too slow, there are too many at once, or it cannot be unpacked.
            ClientGone: the client disconnected before its end.
        """
        holder, held = exchange.holder, 0

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
            unpack = _unpacker(exchange)
            body = await exchange.body(most, self._timeout, claim)
            if unpack is not None:
                body = await unpack(body, most, claim)
            claim(len(body) + VALUE * _num_values(body))
            if len(body) > SMALL:
                async with self._turn:
                    await asyncio.sleep(0)
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


def _unpacker(exchange: HttpExchange) -> Unpack | None:
    """Returns what unpacks the body of a request; None: it is not packed.

    Raises:
        ApiError: it is packed in another way than with gzip.
    """
    given = b",".join([value for name, value in exchange.scope["headers"] if name == b"content-encoding"])
    codings = [coding for part in given.lower().split(b",") if (coding := part.strip()) not in (b"", b"identity")]
    if not codings:
        return None
    if len(codings) == 1 and codings[0] in GZIP:
        return unpacked
    exchange.more.append((b"accept-encoding", b"gzip"))
    raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body may be packed with gzip, and in no other way",
                   "Content-Encoding", "encoding_not_supported")


async def unpacked(body: bytes, most: int, claim: Claim) -> bytes:
    """The content of `body`, one gzip member, with a pass of the event loop after each piece.

    Args:
        most: bytes that it may have.
        claim: receives the bytes of both, before each piece of the content is there; may refuse by raising.

    Raises:
        ApiError: it is no gzip, or unpacks to too much.
    """
    inflate = zlib.decompressobj(GZIP_FORMAT)
    parts: list[bytes] = []
    size, rest = 0, body
    while not inflate.eof:
        claim(len(body) + size + STEP)
        try:
            part = inflate.decompress(rest, STEP)
        except zlib.error as error:
            raise _no_gzip(str(error)) from error
        rest = inflate.unconsumed_tail
        if not part and not rest and not inflate.eof:
            raise _no_gzip("it ends too early")
        size += len(part)
        if size > most:
            raise too_large(most)
        parts.append(part)
        await asyncio.sleep(0)
    if inflate.unused_data:
        raise _no_gzip("something follows its end")
    return b"".join(parts)


def _no_gzip(why: str) -> ApiError:
    return bad_request(f"the body is not the gzip that Content-Encoding says: {why}", code="malformed_gzip")

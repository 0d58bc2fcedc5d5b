"""`GET /events`: the event log of this server, as it is written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from urllib.parse import parse_qsl

from slotwise.observe.event_log import Entry, Gap, encode_lines
from slotwise.observe.ring import Ring
from slotwise.server.errors import bad_request
from slotwise.server.generate import Api
from slotwise.server.http_exchange import HttpExchange
from slotwise.server.subscribers import TenantFilter

SWITCHES = ("backlog", "follow")  # 0 or 1, both 1 where they are not given
EVERY = 0.1  # seconds between two looks at what is new
MOST = 64  # entries encoded at a time: a millisecond in which no other stream is served
UNREAD = 10.0  # seconds a viewer has to read what was written, beyond what sockets and buffers hold
MAX_UNSENT = 128 << 10  # bytes of them
NDJSON = b"application/x-ndjson"

logger = logging.getLogger(__name__)


async def events(api: Api, exchange: HttpExchange) -> None:
    """The event log, live: a JSON object a line (see observe.log).

    It begins with what is still remembered, or with `backlog=0` with those who live; it ends with the server, or with
    `follow=0` with what has been written.
    """
    switches = _switches(exchange)
    api.batched_observer.flush()
    view = _View(api.recorder.ring, TenantFilter(api.keys.scope_of(exchange.tenant)))
    gone = asyncio.Event()
    with api.subscribers.entering(exchange.holder):
        if exchange.is_head:
            await exchange.event(b"", NDJSON)
            await exchange.close()
            return
        exchange.limit_unsent(MAX_UNSENT)
        async with exchange.watched(gone.set):
            await _tell(exchange, view.opening() if switches["backlog"] else view.opening_now(), gone)
            while not gone.is_set():
                is_ending = not switches["follow"] or (api.engine_client.draining and api.engine_client.state != "busy")
                api.batched_observer.flush()
                if lines := view.more():
                    await _tell(exchange, lines, gone)
                    await asyncio.sleep(0)  # a socket that takes all at once would let nobody else have a turn
                elif is_ending:
                    break
                else:
                    await asyncio.sleep(EVERY)
            await exchange.close()


async def _tell(exchange: HttpExchange, lines: bytes, gone: asyncio.Event) -> None:
    """Write `lines`.  A viewer that leaves them unread for `UNREAD` seconds is disconnected, and `gone` is set."""
    try:
        async with asyncio.timeout(UNREAD):
            await exchange.event(lines, NDJSON)
    except TimeoutError:
        logger.warning("a viewer of the events was disconnected: it read nothing for %g seconds", UNREAD)
        exchange.abort()
        await gone.wait()


def _switches(exchange: HttpExchange) -> dict[str, bool]:
    found = dict.fromkeys(SWITCHES, True)
    for name, value in parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name in found:
            if value not in ("0", "1"):
                raise bad_request(f"{name} is 0 or 1", name)
            found[name] = value == "1"
    return found


class _View:
    """What one viewer has seen of a ring, which waits for nobody."""

    def __init__(self, ring: Ring, tenant_filter: TenantFilter) -> None:
        self._ring = ring
        self._filter = tenant_filter
        self._position = 0

    def opening(self) -> bytes:
        """What to know of those who come before all that is remembered."""
        self._position = self._ring.first
        return self._lines(self._ring.preface())

    def opening_now(self) -> bytes:
        """What to know of those who live."""
        self._position = self._ring.end
        return self._lines(self._ring.living())

    def more(self) -> bytes:
        """A few lines that have not been seen yet; empty when there are none."""
        batch = self._ring.since(self._position, MOST)
        self._position = batch.position
        known = [Gap(batch.missed), *self._ring.preface()] if batch.missed else []
        opening = self._lines(known)  # before the rest, for it tells whose requests those are
        return opening + b"".join(map(self._filter.line, batch.lines))

    def _lines(self, entries: Iterable[Entry]) -> bytes:
        return encode_lines([self._filter.before(entry) for entry in entries])

"""The page that draws the batch.  It holds no data: it asks `/events` for them, and its reader for a key if need be."""

from __future__ import annotations

from slotwise.observe.timeline import page
from slotwise.server.generate import Api
from slotwise.server.http_exchange import HttpExchange

HTML = b"text/html; charset=utf-8"


async def timeline(api: Api, exchange: HttpExchange) -> None:
    """The batch drawn as it is rebuilt, step by step: a page for people."""
    await exchange.respond(page.live(), content_type=HTML, headers=[
        (b"content-security-policy", page.policy()), (b"cache-control", b"no-cache"),
        (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")])

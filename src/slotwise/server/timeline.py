"""The timeline page.  It holds no data: it fetches `/events`, and prompts its reader for a key if one is needed."""

from __future__ import annotations

from slotwise.observe.timeline import page
from slotwise.server.http_exchange import HttpExchange

HTML = b"text/html; charset=utf-8"


async def timeline(exchange: HttpExchange) -> None:
    """The live timeline of the batch, step by step, as an HTML page."""
    await respond(exchange, page.live())


async def respond(exchange: HttpExchange, document: bytes) -> None:
    """Send a page of `observe.timeline`."""
    await exchange.respond(document, content_type=HTML, headers=[
        (b"content-security-policy", page.policy()), (b"cache-control", b"no-cache"),
        (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")])

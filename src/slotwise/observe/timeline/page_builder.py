"""The timeline as one self-contained HTML document: it loads no other resource, so it also opens from a file."""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Iterable
from functools import cache

from slotwise.observe.one_page import Asset, digest, filled, joined

MODULES = ("runs", "request", "history", "view", "layout", "palette", "pen", "lanes", "queue", "ranks", "gauges",
           "picture", "story", "service", "demo", "save", "hands", "page", "focus", "controls", "main")
BASE_STYLE, SERVICE = (Asset(__package__, f"assets/{name}") for name in ("base.css", "service.js"))
"""What the chat page has in common with the timeline."""


@cache
def live() -> bytes:
    """Returns the page that follows the server it was loaded from."""
    return _document("").encode()


@cache
def of_router() -> bytes:
    """Returns the page that follows a replica of the router that it was loaded from, and offers the others."""
    return _document('<template id="router"></template>').encode()


def saved(name: str, lines: Iterable[bytes]) -> bytes:
    """Returns the page with an embedded event log.

    Args:
        name: of the log.
        lines: its entries, one JSON object each.
    """
    packed = base64.b64encode(gzip.compress(b"".join(lines), 6)).decode()
    log = f'<script type="application/gzip" id="log" data-name="{html.escape(name)}">{packed}</script>'
    return _document(log).encode()


@cache
def policy() -> bytes:
    """Returns the live page's Content-Security-Policy: only its own script, style and server.

    Pages of this server may show it in a frame, as the chat page does.
    """
    return (f"default-src 'none'; script-src {digest(_script())}; style-src {digest(_style())}; "
            "style-src-attr 'unsafe-inline'; connect-src 'self'; img-src data: blob:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'self'").encode()


def _document(log: str) -> str:
    parts = {"style": _style(), "script": _script(), "log": log}
    return filled(Asset(__package__, "assets/page.html").read(), parts)


@cache
def _style() -> str:
    return BASE_STYLE.read() + Asset(__package__, "assets/page.css").read()


@cache
def _script() -> str:
    return joined(Asset(__package__, f"assets/{name}.js") for name in MODULES)

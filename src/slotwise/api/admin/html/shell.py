"""The frame of a page: its head, its style, its script, and the policy under which a browser runs it.

A page loads nothing.  Its Content-Security-Policy names its style and its script by their digests, so that a browser
applies and runs those two and nothing that a name or an answer smuggles in.
"""

from __future__ import annotations

from functools import cache
from html import escape

from slotwise.api.http.http_exchange import HttpExchange
from slotwise.observe.one_page import Asset, digest
from slotwise.observe.timeline.page_builder import BASE_STYLE

HTML = b"text/html; charset=utf-8"
DARK = ":root.dark"  # the selector of the dark colors
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}{script}
</body>
</html>
"""


def page(title: str, body: str, script: str = "") -> bytes:
    """Returns the document.  Args: body: HTML; script: JavaScript, "" for none."""
    run = f"\n<script>{script}</script>" if script else ""
    return PAGE.format(title=escape(title), style=style(), body=body, script=run).encode()


async def respond(exchange: HttpExchange, document: bytes, script: str = "") -> None:
    """Send a document that `page` made.  Args: script: of the document."""
    await exchange.respond(document, content_type=HTML, headers=[
        (b"content-security-policy", policy(script)), (b"cache-control", b"no-cache"),
        (b"referrer-policy", b"no-referrer")])


@cache
def policy(script: str = "") -> bytes:
    """Returns the Content-Security-Policy of a page with this script, which may send requests to this server only."""
    run = f"script-src {digest(script)}; connect-src 'self'; require-trusted-types-for 'script'; " if script else ""
    return (f"default-src 'none'; style-src {digest(style())}; {run}img-src data:; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'").encode()


@cache
def style() -> str:
    """Returns the style of these pages: the timeline's colors, dark where the reader's system is or chose so."""
    colors, found, _ = BASE_STYLE.read().partition("* {")
    assert found and DARK in colors, BASE_STYLE
    dark = colors[colors.index(DARK) + len(DARK):]
    return f"{colors}@media (prefers-color-scheme: dark) {{ :root:not(.light){dark}}}\n{asset('page.css')}"


def asset(name: str) -> str:
    """Returns the text of a file of this package."""
    return Asset(__package__, f"assets/{name}").read()
